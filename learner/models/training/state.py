"""A model's training state in files that any number of ranks and any ZeRO stage read: safetensors, nothing pickled.

For each trained parameter, under its name in the Hugging Face model:

    state_00000.safetensors   weight/NAME, exp_avg/NAME, exp_avg_sq/NAME: whole, float32 (the master weights)
    state.json                schema, number of optimizer updates, steps of the schedule, and parameter -> file

Memory: besides its own state, a rank holds one shard while it saves, and one parameter while it loads.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from learner.models.read_back import WrittenFiles
from learner.models.training.shards import MOMENTS, WEIGHT, ZeroShards
from protocol.errors import OperatorError
from protocol.weights.digest import NUM_SUMS, byte_sums, digest_of_all, digest_of_sums
from protocol.weights.wire import cut_into_runs

SCHEMA = 1
_DESCRIPTION = "state.json"
_KEYS = (WEIGHT, *MOMENTS)
_FLOAT32_BYTES = 4
SHARD_BYTES = 1 << 30

Weights = Sequence[tuple[str, Tensor]]


class Progress(NamedTuple):
    """The place of a state in its run."""

    num_updates: int  # applied optimizer updates
    schedule_steps: float  # steps of the run that the learning rate's schedule counts


def save_state(
    folder: Path,
    shards: ZeroShards,
    weights: Weights,
    progress: Progress,
    digests: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
) -> WrittenFiles:
    """Write the state of `weights`; return this rank's files, every world_size-th shard. Collective.

    digests: of KEY/NAME in memory. All files exist on returning.
    Raises: OSError or SafetensorError when the disk refuses.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    shards.prepare()
    files: dict[str, str] = {}
    written: WrittenFiles = {}
    mine: dict[str, Tensor] = {}
    mine_name = ""
    plan = _cut_into_shards(weights, shards, shard_bytes)
    for number, shard in enumerate(plan):
        name = f"state_{number:05d}.safetensors"
        files |= dict.fromkeys((weight for weight, _ in shard), name)
        is_mine = number % world_size == rank
        for key in _KEYS:
            for weight, parameter in shard:
                whole = shards.whole(parameter, key)
                if is_mine:
                    mine[f"{key}/{weight}"], mine_name = whole.detach().to("cpu").contiguous(), name
        # Every rank has one now, or there are no more: they write side by side.
        if (number + 1) % world_size == 0 or number + 1 == len(plan):
            if mine:
                save_file(mine, folder / mine_name, metadata={"format": "pt"})
                written[folder / mine_name] = {name: digests[name] for name in mine}
            mine = {}
    if rank == 0:
        description = {"schema": SCHEMA, **progress._asdict(), "files": files}
        (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")
    dist.barrier()
    return written


def load_state(folder: Path, shards: ZeroShards, weights: Weights) -> Progress:
    """Load a state of any number of ranks and any ZeRO stage; returns its progress. Collective.

    Raises: OperatorError when it has other parameters; the model may be useless then.
    """
    description = _read_description(folder)
    files: dict[str, str] = description["files"]
    if files.keys() != {name for name, _ in weights}:
        names = sorted(files.keys() ^ {name for name, _ in weights})
        raise _unfit(folder, f"it and the policy differ in {len(names)} parameters, such as {names[0]}")
    shards.prepare()
    for file in sorted(set(files.values())):
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name, parameter in weights:
                    if files[name] == file:
                        _load(folder, opened, shards, name, parameter)
        except (SafetensorError, OSError) as error:
            raise _unfit(folder, f"{file} cannot be read: {error}") from None
    num_updates = int(description["num_updates"])
    shards.set_num_updates(num_updates)
    return Progress(num_updates, float(description["schedule_steps"]))


def _load(folder: Path, file: Any, shards: ZeroShards, name: str, parameter: Tensor) -> None:
    shape = shards.shape_of(parameter)
    for key in _KEYS:
        found = tuple(file.get_slice(f"{key}/{name}").get_shape())
        if found != shape:
            raise _unfit(folder, f"{key} of {name} has the shape {found} in it and {shape} in the policy")
    shards.set_weight(parameter, lambda: file.get_tensor(f"{WEIGHT}/{name}"))
    start, stop = shards.kept_range(parameter)
    for key in _KEYS:
        shards.set_kept(parameter, key, _read_range(file.get_slice(f"{key}/{name}"), shape, start, stop))


def _read_range(stored: Any, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Return elements start to stop of the flattened tensor, reading only the rows that contain them."""
    if start == stop:
        return torch.empty(0)
    if not shape:
        scalar: Tensor = stored[...]
        return scalar.flatten()
    row = max(1, torch.Size(shape[1:]).numel())
    first = start // row
    rows: Tensor = stored[first : -(-stop // row)]
    return rows.flatten()[start - first * row : stop - first * row]


def _cut_into_shards(weights: Weights, shards: ZeroShards, shard_bytes: int) -> list[list[tuple[str, Tensor]]]:
    """Return the weights in order, in runs whose state fits into shard_bytes."""
    return cut_into_runs(
        weights, lambda pair: torch.Size(shards.shape_of(pair[1])).numel() * _FLOAT32_BYTES * len(_KEYS), shard_bytes
    )


def _read_description(folder: Path) -> dict[str, Any]:
    try:
        description = json.loads((folder / _DESCRIPTION).read_bytes())
    except (OSError, ValueError) as error:
        raise _unfit(folder, f"its {_DESCRIPTION} cannot be read: {error}") from None
    if not isinstance(description, dict) or description.get("schema") != SCHEMA:
        raise _unfit(folder, f"its {_DESCRIPTION} is not of schema {SCHEMA}")
    return description


def _unfit(folder: Path, problem: str) -> OperatorError:
    return OperatorError(
        f"The state in {folder} cannot be put into this policy: {problem}. Resume with the policy.model that wrote it, "
        "or start a new run from the model folder of that checkpoint."
    )


def digest_held_state(
    shards: ZeroShards, weights: Sequence[tuple[str, Tensor]], device: torch.device
) -> dict[str, str]:
    """Return KEY/NAME -> digest of each master weight and moment in memory. Collective.

    Each rank reads its own part once, and the sums are added: nothing is gathered, so a fault of gathering or writing
    shows as another digest.

    device: on which ranks reduce. Example: "exp_avg/lm_head.weight" -> 32 hexadecimal digits.
    """
    shards.prepare()
    names = [(key, name, parameter) for name, parameter in weights for key in _KEYS]
    sums = torch.zeros(len(names), NUM_SUMS, dtype=torch.int64, device=device)
    if shards.is_shared or dist.get_rank() == 0:
        for row, (key, _, parameter) in zip(sums, names, strict=True):
            start, stop = shards.kept_range(parameter)
            if stop > start:
                row += byte_sums(shards.read_kept(parameter, key), first_byte=start * _FLOAT32_BYTES).to(device)
    dist.all_reduce(sums)
    sums = sums.cpu()
    return {
        f"{key}/{name}": digest_of_sums(f"{key}/{name}", "float32", shards.shape_of(parameter), row)
        for row, (key, name, parameter) in zip(sums, names, strict=True)
    }


def digest_of_weights(digests: Mapping[str, str]) -> str:
    """Return one digest of all master weights. digests: as `digest_held_state` returns them."""
    return digest_of_all({name: digest for name, digest in digests.items() if name.startswith(f"{WEIGHT}/")})
