"""A trained model's state as its files have it: measured against what the ranks told, and put into a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from learner.checkpoint.told import ToldModel
from learner.models.training.shards import WEIGHT
from learner.models.training.state_digest import KEYS
from learner.rank.proof.refused import RefusedError
from learner.rank.proof.witness import digests_by_key
from protocol.weights.digest import digest_of_tensor

_DESCRIPTION = "state.json"


def check_state(folder: Path, role: str, told: ToldModel, put: Callable[[str, Tensor], None]) -> None:
    """Read a role's state as a resume does, one tensor at a time; each has to be what the ranks held.

    put: takes (name, float32 weight) of each trained parameter. Raises: RefusedError naming what is not as it was told.
    """
    description = json.loads((folder / _DESCRIPTION).read_bytes())
    if description["num_updates"] != told.num_updates:
        raise RefusedError(
            f"the state of the {role} is of {description['num_updates']} updates, its ranks held {told.num_updates}"
        )
    files: dict[str, str] = description["files"]
    expected = {name.removeprefix(f"{WEIGHT}/") for name in told.digests if name.startswith(f"{WEIGHT}/")}
    if files.keys() != expected:
        name = min(files.keys() ^ expected)
        raise RefusedError(f"the state of the {role} has other parameters than its ranks held, such as {name}")
    if (present := {path.name for path in folder.iterdir()}) != {_DESCRIPTION, *files.values()}:
        raise RefusedError(f"the state of the {role} has other files than it lists: {sorted(present)}")
    found: dict[str, str] = {}
    for file in sorted(set(files.values())):
        with safe_open(folder / file, framework="pt") as opened:
            found |= _check_file(opened, file, role, told, [name for name in files if files[name] == file], put)
    _check_it_has_moved(found, role, told)


def _check_file(
    opened: Any, file: str, role: str, told: ToldModel, names: list[str], put: Callable[[str, Tensor], None]
) -> dict[str, str]:
    """Return KEY/NAME -> digest of every tensor in a file, each compared with what was told."""
    expected = {f"{key}/{name}" for name in names for key in KEYS}
    if set(opened.keys()) != expected:
        raise RefusedError(f"{file} of the {role} holds other tensors than {_DESCRIPTION} says")
    found: dict[str, str] = {}
    for full_name in sorted(expected):
        tensor: Tensor = opened.get_tensor(full_name)
        found[full_name] = digest_of_tensor(full_name, tensor)
        if found[full_name] != told.digests[full_name]:
            key, _, name = full_name.partition("/")
            raise RefusedError(f"{key} of {name} in {file} of the {role} is not what the ranks held when they saved")
        if full_name.startswith(f"{WEIGHT}/"):
            put(full_name.removeprefix(f"{WEIGHT}/"), tensor)
    return found


def _check_it_has_moved(found: dict[str, str], role: str, told: ToldModel) -> None:
    if not told.must_differ:
        return
    for key, digest in digests_by_key(found).items():
        if digest == told.before.get(key):
            raise RefusedError(
                f"{key} of the {role} is, byte for byte, that of the checkpoint before, although updates with a "
                "gradient and a learning rate above 0 were applied since then"
            )
