"""The refusal of ranks that a role cannot have of its own."""

from collections.abc import Mapping
from typing import Any

_NAMES = ("num_ranks", "num_nodes", "num_gpus", "num_gpus_per_node")


def refuse_own_ranks(role: str, given: Any) -> Any:
    """Return what was given. Raises: ValueError where it names ranks or GPUs for a role that lives on the learner's."""
    asked = [name for name in _NAMES if isinstance(given, Mapping) and name in given]
    if asked:
        raise ValueError(
            f"{asked[0]}: the {role} has no ranks of its own in this version, it lives on the policy's. Remove it; "
            f"to make room there, raise learner.num_ranks or set {role}.offload."
        )
    return given
