"""Learning a teacher's distributions on the tokens of rows: the generalised Jensen-Shannon divergence.

p_S, p_T: distributions of student and teacher at distill.temperature, over the vocabulary, at each learnt token.

beta = 0  KL(p_T || p_S)
beta = 1  KL(p_S || p_T)
else      beta KL(p_T || m) + (1 - beta) KL(p_S || m), m = (1 - beta) p_S + beta p_T     arXiv 2306.13649

The loss is the mean over the tokens of all ranks, plus distill.nll_coefficient times their mean negative logprob.
Shapes: K model tokens of a micro-batch, V vocabulary.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from learner.algorithms.whiten import Reduce
from learner.models.gradient import StepResult, Sums
from learner.models.micro_batch import MicroBatch
from learner.models.reference import ReferenceModel
from learner.models.roles import Roles
from learner.objectives.supervised import Supervised
from protocol.settings.preference import DistillSettings
from protocol.settings.settings import Settings


class Distillation(Supervised):
    """Takes the steps of a run with objective = distill. The teacher is the reference."""

    def __init__(self, roles: Roles, settings: Settings, model: Path, reduce: Reduce) -> None:
        """Arguments: as of `HeldOut`."""
        self._teacher, self._distill = cast(ReferenceModel, roles.reference), settings.distill
        super().__init__(roles, settings, model, reduce)

    def _update(self, micro_batches: Sequence[MicroBatch], divisor: float) -> StepResult:
        with self._teacher.in_use():
            return self._policy.step_of_logits(micro_batches, self._teacher.logits, self._of_logits, divisor)

    def _loss(self, logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        with self._teacher.in_use():
            taught = self._teacher.logits(micro_batch)
        loss, sums = self._of_logits(self._policy.logits(micro_batch), taught, micro_batch)
        return loss.cpu(), sums

    def _of_logits(self, student: Tensor, teacher: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        """Return (sum over the learnt tokens, no metrics). student, teacher: logits [K, V]."""
        return distillation_loss(self._distill, student, teacher, micro_batch), {}


def distillation_loss(settings: DistillSettings, student: Tensor, teacher: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return the weighted sum over tokens, of logits [K, V]. Entries beyond the smaller V are padding, and left out."""
    width = min(student.shape[-1], teacher.shape[-1])
    student, teacher = (_at_least_float32(each[..., :width]) for each in (student, teacher))
    losses = divergence(student, teacher, settings.beta, settings.temperature)
    if settings.nll_coefficient:
        targets = micro_batch.targets.to(student.device)[:, None]
        losses = losses - settings.nll_coefficient * log_softmax(student, -1).gather(1, targets)[:, 0]
    return (losses * micro_batch.weights.to(student.device)).sum()


def divergence(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Return each token's divergence [K] in nats, of logits [K, V]. The teacher's have no gradient."""
    own, taught = (log_softmax(each / temperature, -1) for each in (student, teacher.detach()))
    if beta in (0.0, 1.0):
        return _kl(taught, own) if beta == 0.0 else _kl(own, taught)
    mixture = torch.logaddexp(own + math.log1p(-beta), taught + math.log(beta))
    return beta * _kl(taught, mixture) + (1.0 - beta) * _kl(own, mixture)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
