"""Parameters that ZeRO 3 has split over the ranks, made whole on the first of them alone.

DeepSpeed's own gathering makes them whole on every rank, one message for each: of a model of many small parameters most
of the time goes into messages, and the rest into copies that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.weights.runs import cut_into_runs

_ALONE_BYTES = 1 << 20  # a parameter of at least so many bytes is received where it stays, in a message of its own
_TOGETHER_BYTES = 4 << 20  # of the parameters in one message


@torch.no_grad()
def whole_on_first(deepspeed: Any, parameters: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return each parameter whole on rank 0, and tensors of no meaning on the others. All ranks together.

    What every rank holds whole is returned as it is. Rank 0 has up to 12 MiB more than what is returned meanwhile.
    """
    whole: dict[int, Tensor] = {}
    split = [each for each in dict.fromkeys(parameters) if _is_split(each)]
    for parameter in parameters:
        if id(parameter) not in whole and not _is_split(parameter):
            whole[id(parameter)] = parameter.detach()
    for run in _in_messages([each for each in split if _can_be_sent(each)]):
        found = _received(run, device)
        whole |= {id(each): tensor for each, tensor in zip(run, found, strict=True)}
    for parameter in split:
        if not _can_be_sent(parameter):
            with deepspeed.zero.GatheredParameters([parameter]):
                whole[id(parameter)] = parameter.detach().clone()
    return [whole[id(each)] for each in parameters]


def _is_split(parameter: Any) -> bool:
    """Return whether no rank holds it whole now. DeepSpeed keeps small parameters whole between steps."""
    return hasattr(parameter, "ds_status") and parameter.ds_status.name != "AVAILABLE"


def _can_be_sent(parameter: Any) -> bool:
    """Return whether the ranks' parts are plain numbers in memory: DeepSpeed alone reads quantised ones, and NVMe."""
    part = parameter.ds_tensor
    return not hasattr(part, "ds_quant_scale") and part.status.name == "AVAILABLE"


def _in_messages(parameters: Sequence[Any]) -> list[list[Any]]:
    """Return them in runs of one type and one process group each."""
    alike: dict[tuple[object, ...], list[Any]] = {}
    for each in parameters:
        num_bytes = each.ds_numel * each.element_size()
        own = id(each) if num_bytes >= _ALONE_BYTES else None
        alike.setdefault((each.ds_tensor.dtype, id(each.ds_process_group), own), []).append(each)
    return [
        run
        for group in alike.values()
        for run in cut_into_runs(group, lambda each: int(each.ds_numel * each.element_size()), _TOGETHER_BYTES)
    ]


def _received(run: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Return parameters of one type that went as one message. Each rank sends the parts that it keeps of them all."""
    group, num_ranks = run[0].ds_process_group, run[0].ds_zero_partition_world_size
    parts = [each.ds_tensor.detach().flatten().to(device) for each in run]
    mine = parts[0] if len(run) == 1 else torch.cat(parts)
    if run[0].ds_zero_partition_rank:
        dist.gather(mine, None, group=group, group_dst=0)
        return [part.new_empty(0) for part in parts]
    flat = mine.new_empty(num_ranks * len(mine))
    dist.gather(mine, list(flat.view(num_ranks, -1)), group=group, group_dst=0)
    if len(run) == 1:
        return [flat[: run[0].ds_numel].view(run[0].ds_shape)]
    by_parameter = flat.view(num_ranks, -1).split([len(part) for part in parts], dim=1)
    return [found.flatten()[: each.ds_numel].view(each.ds_shape) for each, found in zip(run, by_parameter, strict=True)]
