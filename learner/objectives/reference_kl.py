"""The KL divergence of the learner from the reference model: in the reward or in the loss, and its coefficient.

Shape: K model tokens of a micro-batch.
"""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.kl import KL_FORMS, KlController
from learner.models.micro_batch import MicroBatch
from protocol.settings.algorithm.kl import KlSettings

_COEFFICIENT = "kl_coefficient"


@dataclass(frozen=True)
class ReferenceKl:
    """memory: holds the coefficient from step to step."""

    settings: KlSettings
    memory: MutableMapping[str, float]

    @property
    def coefficient(self) -> float:
        """What the settings say, until a target has moved it."""
        if self.settings.target is None:
            return self.settings.coefficient  # a resumed run's own, whatever an earlier start's target made of it
        return self.memory.get(_COEFFICIENT, self.settings.coefficient)

    @property
    def is_in_reward(self) -> bool:
        return self.settings.coefficient > 0.0 and self.settings.place == "reward"

    def of_tokens(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor | None:
        """Return each token's estimate [K], None where there is no reference."""
        reference = micro_batch.reference_logprobs
        return None if reference is None else KL_FORMS[self.settings.form](logprobs, reference)

    def penalties(self, micro_batch: MicroBatch) -> Tensor:
        """Return what each token's reward is changed by, [K] float64: 0 where the KL is not in the reward."""
        if not self.is_in_reward:
            return torch.zeros(micro_batch.num_model_tokens, dtype=torch.float64)
        assert micro_batch.old_logprobs is not None
        kl = self.of_tokens(micro_batch.old_logprobs, micro_batch)
        assert kl is not None
        return -self.coefficient * kl.double()

    def in_loss(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor | None:
        """Return what each token's loss grows by, [K]; None where the KL is not in the loss."""
        if self.is_in_reward:
            return None
        kl = self.of_tokens(logprobs, micro_batch)
        return None if kl is None else self.coefficient * kl

    def follow(self, kl: float, num_trajectories: int) -> None:
        """Move the coefficient after a step. kl: its mean over the tokens; one that is not finite says nothing."""
        if self.settings.target is not None and math.isfinite(kl):
            controller = KlController(self.settings.target, self.settings.horizon)
            self.memory[_COEFFICIENT] = controller.next_coefficient(self.coefficient, kl, num_trajectories)
