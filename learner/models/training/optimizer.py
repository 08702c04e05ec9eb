"""AdamW that clips and refuses gradients that are not finite, the check of weights, and the learning rate.

ZeRO 2 and 3 clip and check inside DeepSpeed, on partitions; stage 0 leaves both to `GuardedAdamW`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_


class GuardedAdamW(torch.optim.AdamW):
    """AdamW with `overflow`: true after a refused step. DeepSpeed then reports the step as not applied."""

    def __init__(self, params: Any, max_grad_norm: float, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._max_grad_norm = max_grad_norm
        self.overflow = False
        self.cur_scale = 1.0  # divides the gradient of the next step, as DeepSpeed's optimizers do
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Divide, clip, then update; skip the update when the norm of the reduced gradient is not finite."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.cur_scale != 1.0:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1.0 / self.cur_scale)
        self._global_grad_norm = float(clip_grad_norm_(parameters, self._max_grad_norm, foreach=True))
        self.overflow = not torch.isfinite(torch.tensor(self._global_grad_norm)).item()
        if not self.overflow:
            super().step(closure)


class NonFiniteWeightsError(RuntimeError):
    """A weight or optimizer state is not finite: nothing was pushed or saved. Resume from the last checkpoint."""


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with NaN or infinity, or None. Reads each once and allocates nothing."""
    for name, tensor in named:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = torch.aminmax(tensor.detach())  # a NaN anywhere makes both NaN
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            return name
    return None


def learning_rate_factor(done: int, *, warmup_steps: int, total_steps: int, min_ratio: float, schedule: str) -> float:
    """Return the share of the peak learning rate for the update that follows `done` applied ones.

    Linear from 1 / warmup_steps to 1, then `schedule` down to min_ratio at update total_steps, then flat.
    Example: warmup_steps 2, total_steps 4, linear to 0 gives 0.5, 1.0, 0.5, 0.0, 0.0.
    Raises: KeyError for a schedule that is not in SCHEDULES.
    """
    shape = SCHEDULES[schedule]
    update = done + 1
    if update <= warmup_steps:
        return update / warmup_steps
    first = max(1, warmup_steps)  # the last update at the peak
    progress = min(1.0, (update - first) / max(1, total_steps - first))
    return min_ratio + (1.0 - min_ratio) * shape(progress)


# Share of the run after the warm-up -> share of the way from the last learning rate to the peak.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
