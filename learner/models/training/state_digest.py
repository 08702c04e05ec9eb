"""The digest of a training state as the ranks hold it, before anything of it is gathered or written.

Each rank reads its own part of every master weight and moment once; what all ranks found is added up. It shares neither
the gathering nor the files with `state.py`, so that it can tell whether those did right.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from learner.models.training.shards import MOMENTS, WEIGHT, ZeroShards
from protocol.weights.digest import NUM_SUMS, byte_sums, digest_of_all, digest_of_sums

KEYS = (WEIGHT, *MOMENTS)
_FLOAT32_BYTES = 4


def digest_held_state(
    shards: ZeroShards, weights: Sequence[tuple[str, Tensor]], device: torch.device
) -> dict[str, str]:
    """Return KEY/NAME -> digest of each trained parameter's master weight and moments; all ranks together.

    device: on which ranks reduce. Example: "exp_avg/lm_head.weight" -> 32 hexadecimal digits.
    """
    shards.prepare()
    names = [(key, name, parameter) for name, parameter in weights for key in KEYS]
    sums = torch.zeros(len(names), NUM_SUMS, dtype=torch.int64, device=device)
    if shards.is_shared or dist.get_rank() == 0:
        for row, (key, _, parameter) in zip(sums, names, strict=True):
            start, stop = shards.kept_range(parameter)
            if stop > start:
                row += byte_sums(shards.kept(parameter, key), first_byte=start * _FLOAT32_BYTES).to(device)
    dist.all_reduce(sums)
    sums = sums.cpu()
    return {
        f"{key}/{name}": digest_of_sums(f"{key}/{name}", "float32", shards.shape_of(parameter), row)
        for row, (key, name, parameter) in zip(sums, names, strict=True)
    }


def digest_of_weights(digests: Mapping[str, str]) -> str:
    """Return one digest of all master weights. digests: as `digest_held_state` returns them."""
    return digest_of_all({name: digest for name, digest in digests.items() if name.startswith(f"{WEIGHT}/")})
