"""The optimizer that DeepSpeed is given: AdamW that clips by global norm and refuses a gradient that is not finite.

ZeRO 2 and 3 clip and check inside DeepSpeed, on partitions; stage 0 leaves both to this.
"""

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_


class GuardedAdamW(torch.optim.AdamW):
    """`overflow` says after a step that it was refused: DeepSpeed reads it and reports the step as not applied."""

    def __init__(self, params: Any, max_grad_norm: float, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._max_grad_norm = max_grad_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, then update; leave weights and moments as they are when the norm is not finite.

        Gradients are already reduced over the ranks here, so every rank decides the same.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._global_grad_norm = float(clip_grad_norm_(parameters, self._max_grad_norm, foreach=True))
        self.overflow = not torch.isfinite(torch.tensor(self._global_grad_norm)).item()
        if not self.overflow:
            super().step(closure)
