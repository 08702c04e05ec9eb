"""The KL penalty against the reference model, in the reward or in the loss, and its coefficient.

Shape: K model tokens of a micro-batch.
"""

import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.kl import KL_FORMS, KlController
from learner.models.micro_batch import MicroBatch
from protocol.settings.algorithm import KlSettings

_COEFFICIENT = "kl_coefficient"
_BEGAN_AT = "kl_coefficient_of_settings"  # kl.coefficient with which the controller began


@dataclass(frozen=True)
class ReferenceKl:
    """memory: keeps the coefficient between steps."""

    settings: KlSettings
    memory: MutableMapping[str, float]

    @property
    def coefficient(self) -> float:
        """The coefficient of the settings, or the controller's if there is a target.

        A resume with another kl.coefficient restarts the controller; one without the target drops it.
        """
        given = self.settings.coefficient
        if self.settings.target is None or self.memory.get(_BEGAN_AT, given) != given:
            return given
        return self.memory.get(_COEFFICIENT, given)

    @property
    def is_in_reward(self) -> bool:
        return self.settings.coefficient > 0.0 and self.settings.place == "reward"

    def of_tokens(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor | None:
        """Return each token's estimate [K], None where there is no reference."""
        reference = micro_batch.reference_logprobs
        return None if reference is None else KL_FORMS[self.settings.form](logprobs, reference)

    def penalties(self, micro_batch: MicroBatch) -> Tensor:
        """Return the change of each token's reward, [K] float64; 0 unless the KL is in the reward."""
        if not self.is_in_reward:
            return torch.zeros(micro_batch.num_model_tokens, dtype=torch.float64)
        assert micro_batch.old_logprobs is not None
        kl = self.of_tokens(micro_batch.old_logprobs, micro_batch)
        assert kl is not None
        return -self.coefficient * kl.double()

    def in_loss(self, logprobs: Tensor, micro_batch: MicroBatch) -> Tensor | None:
        """Return the term of each token's loss, [K]; None unless the KL is in the loss."""
        if self.is_in_reward:
            return None
        kl = self.of_tokens(logprobs, micro_batch)
        return None if kl is None else self.coefficient * kl

    def follow(self, kl: float, num_trajectories: int) -> None:
        """Update the coefficient after a step. kl: mean over the tokens; ignored when not finite."""
        if self.settings.target is None:
            self.memory.pop(_COEFFICIENT, None)
        elif math.isfinite(kl):
            controller = KlController(self.settings.target, self.settings.horizon)
            self.memory[_COEFFICIENT] = controller.next_coefficient(self.coefficient, kl, num_trajectories)
            self.memory[_BEGAN_AT] = self.settings.coefficient
