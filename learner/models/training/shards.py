"""Master weights and AdamW moments of each parameter, whole or this rank's part, however the ZeRO stage splits them.

Written for DeepSpeed 0.19. A rank keeps in float32, by stage:

    0      every parameter, and AdamW's moments under it (the parameter is its own master)
    1, 2   one flat partition of all parameters' masters; a parameter knows which fragment of it lies there, if any
    3      of every parameter one part of the same length on each rank, the last padded with zeros
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroShards:
    """Access to a rank's part of each parameter. `whole` and `set_weight` are collective."""

    def __init__(self, deepspeed: Any, engine: Any, zero_stage: int) -> None:
        self._utils = deepspeed.utils
        self._gathered = deepspeed.zero.GatheredParameters
        self._stage = zero_stage
        self._zero = engine.optimizer
        # A model that is not trained has no AdamW.
        self._adamw: Any = engine.optimizer if zero_stage == 0 else getattr(engine.optimizer, "optimizer", None)

    def prepare(self) -> None:
        """Create the zero moments that AdamW creates at its first step, unless it has taken one."""
        for stepped in self._stepped_tensors():
            state = self._adamw.state[stepped]
            if not state:
                # The fused AdamW counts in a tensor on the parameter's device.
                state["step"] = torch.zeros((), dtype=torch.float32, device=stepped.device)
                for key in MOMENTS:
                    state[key] = torch.zeros_like(stepped)
        if self._stage in (1, 2):
            self._zero._lazy_init_hp_params_optimizer_state()  # DeepSpeed calls it after the first step

    def shape_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Return a parameter's whole shape; `parameter.shape` is 0 in ZeRO 3."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def whole_numel(self, parameter: Tensor) -> int:
        """Return a parameter's whole number of elements; `parameter.numel()` is 0 in ZeRO 3."""
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    def own_part(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of the weight: in ZeRO 3 its partition without the padding."""
        if self._stage != 3:
            return parameter
        start, stop = self.kept_range(parameter)
        partition: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        return partition.flatten()[: stop - start]

    def whole(self, parameter: Tensor, key: str) -> Tensor:
        """Return the parameter's master weight or moment, gathered from the ranks."""
        if self._stage == 0:
            found: Tensor = parameter if key == WEIGHT else self._adamw.state[parameter][key]
        elif key == WEIGHT:
            found = self._utils.safe_get_full_fp32_param(parameter)
        else:
            found = self._utils.safe_get_full_optimizer_state(parameter, key)
        return found

    def kept_range(self, parameter: Tensor) -> tuple[int, int]:
        """Return (start, stop) of the elements of the flattened parameter whose state this rank keeps."""
        if self._stage == 0:
            return 0, parameter.numel()
        if self._stage in (1, 2):
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                return 0, 0
            address = mapping.lp_fragment_address
            return address.start, address.start + address.numel
        part: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        whole: int = parameter.ds_numel  # type: ignore[attr-defined]
        return min(whole, dist.get_rank() * part), min(whole, (dist.get_rank() + 1) * part)

    @torch.no_grad()
    def read_kept(self, parameter: Tensor, key: str) -> Tensor:
        """Return this rank's elements of a master weight or moment, as `kept_range` says; flat."""
        start, stop = self.kept_range(parameter)
        if self._stage == 0:
            return self.whole(parameter, key).detach().flatten()
        if self._stage in (1, 2):
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                return torch.empty(0)
            found: Tensor = mapping.get_hp_fragment(None if key == WEIGHT else key)
        elif key == WEIGHT:
            found = self._utils.safe_get_local_fp32_param(parameter)
        else:
            found = self._utils.safe_get_local_optimizer_state(parameter, key)
        return found.detach().flatten()[: stop - start]

    @property
    def is_shared(self) -> bool:
        """Whether ranks keep different parts; False: every rank keeps everything."""
        return self._stage > 0

    @torch.no_grad()
    def set_kept(self, parameter: Tensor, key: str, values: Tensor) -> None:
        """Put the elements of `kept_range` into this rank's master weight or moment."""
        if self._stage == 0:
            self.whole(parameter, key).copy_(values.view(parameter.shape))
        elif self._stage in (1, 2):
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                mapping.get_hp_fragment(None if key == WEIGHT else key).copy_(values)
        else:
            part: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            padded = torch.zeros(part.numel(), dtype=torch.float32)
            padded[: values.numel()] = values
            if key == WEIGHT:
                self._utils.safe_set_local_fp32_param(parameter, padded)
            else:
                self._utils.safe_set_local_optimizer_state(parameter, padded, key)

    @torch.no_grad()
    def set_weight(self, parameter: Tensor, read: Callable[[], Tensor]) -> None:
        """Set the parameter that the model computes with. read: returns the whole weight; called on some ranks only."""
        if self._stage != 3:
            parameter.copy_(read())
            return
        # At the end of the block, rank 0's value is sent to every rank.
        with self._gathered([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.copy_(read())

    def set_num_updates(self, num_updates: int) -> None:
        """Set AdamW's number of updates, on which its bias correction depends."""
        for stepped in self._stepped_tensors():
            self._adamw.state[stepped]["step"].fill_(num_updates)

    def drop_gradient(self) -> None:
        """Drop a refused gradient. With the optimizer in host memory DeepSpeed would add the next ones to its NaN."""
        if self._stage in (1, 2):
            self._zero.averaged_gradients = dict.fromkeys(self._zero.averaged_gradients)

    def _stepped_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that AdamW updates."""
        if self._stage == 0:
            for group in self._adamw.param_groups:
                yield from group["params"]
        elif self._stage in (1, 2):
            yield from self._zero.single_partition_of_fp32_groups
        else:
            yield from self._zero.fp32_partitioned_groups_flat
