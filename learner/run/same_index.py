"""Whether the retrievers of all nodes search the same index: what a policy reads must not depend on its server."""

from collections.abc import Mapping
from typing import Literal

from protocol.errors import OperatorError


def compare_indexes(content_hashes: Mapping[str, str], policy: Literal["warn", "refuse"]) -> str | None:
    """Return what to tell the operator when servers search different indexes; None when they do not.

    content_hashes: by server; "" of one that searches none, or whose retriever tells none. policy:
    retriever.other_index. Raises: OperatorError in place of returning it, with refuse.
    """
    known = {server: digest for server, digest in content_hashes.items() if digest}
    if len(set(known.values())) < 2:
        return None
    each = ", ".join(f"{server} searches {digest[:12]}" for server, digest in sorted(known.items()))
    text = (
        f"Rollout servers search different indexes: {each}. What the policy reads depends on its server. Build one "
        "index on every node from the same corpus with the same options, or set retriever.url."
    )
    if policy == "refuse":
        raise OperatorError(f"{text} With retriever.other_index = warn the run goes on in spite of this.")
    return text


class SameIndex:
    """What the servers of a run search, also those that are attached while it goes on."""

    def __init__(self, policy: Literal["warn", "refuse"]) -> None:
        """policy: as `compare_indexes` takes it."""
        self._policy = policy
        self._content_hashes: dict[str, str] = {}  # by server
        self._told: str | None = None

    def take(self, content_hashes: Mapping[str, str]) -> str | None:
        """Add servers that are attached; returns and raises as `compare_indexes` does. What was told is not repeated.

        Servers that are refused are not added.
        """
        known = {**self._content_hashes, **content_hashes}
        text = compare_indexes(known, self._policy)
        self._content_hashes = known
        is_new, self._told = text != self._told, text
        return text if is_new else None
