"""Policy and critic as tables of numbers, by the token before; each takes steps of rate 1 down its gradient."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from learner.models.critic import ValueLoss
from learner.models.gradient import LossFunction, StepResult, Sums, add_sums
from learner.models.micro_batch import MicroBatch


def logprobs_of(logits: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return what the table says of a micro-batch's model tokens, [K]."""
    before = micro_batch.tokens[0][micro_batch.predict_at]
    return logits.log_softmax(-1)[before, micro_batch.targets]


class TableModel:
    """A policy that is a table of logits: logprob of a token = log_softmax(table[token before])[token]."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.losses: list[float] = []

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        return logprobs_of(self.logits.detach(), micro_batch)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        global_weight: float,
        *,
        with_entropy: bool = True,  # entropies are zeros
    ) -> StepResult:
        def of_each(micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
            logprobs = logprobs_of(self.logits, micro_batch)
            return loss(logprobs, torch.zeros_like(logprobs), micro_batch)

        return _step(self.logits, micro_batches, of_each, global_weight, self.losses)

    def add_part(self, micro_batches: Sequence[MicroBatch], loss: LossFunction) -> Sums:
        sums: Sums = {}
        for micro_batch in micro_batches:
            logprobs = logprobs_of(self.logits, micro_batch)
            value, found = loss(logprobs, torch.zeros_like(logprobs), micro_batch)
            value.backward()
            add_sums(sums, {"loss": value, **found})
        return sums

    def update(self, sums: Sums, global_weight: float, *, is_divided: bool) -> StepResult:
        assert not is_divided
        assert self.logits.grad is not None
        self.logits.data -= self.logits.grad / global_weight
        self.logits.grad = None
        found = {key: float(number) for key, number in sums.items()}
        self.losses.append(found.pop("loss") / global_weight)
        return StepResult(True, self.losses[-1], 1.0, found)


class TableCritic:
    """A critic that is a table of values."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.losses: list[float] = []

    def values(self, micro_batch: MicroBatch) -> Tensor:
        return self.table.detach()[micro_batch.tokens[0][micro_batch.predict_at]]

    def step(self, micro_batches: Sequence[MicroBatch], loss: ValueLoss, global_weight: float) -> StepResult:
        def of_each(micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
            return loss(self.table[micro_batch.tokens[0][micro_batch.predict_at]], micro_batch)

        return _step(self.table, micro_batches, of_each, global_weight, self.losses)


def _step(
    table: Tensor,
    micro_batches: Sequence[MicroBatch],
    of_each: Callable[[MicroBatch], tuple[Tensor, Sums]],
    global_weight: float,
    losses: list[float],
) -> StepResult:
    table.grad = None
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[str, float] = {}
    for micro_batch in micro_batches:
        value, found = of_each(micro_batch)
        total = total + value / global_weight
        sums = {key: sums.get(key, 0.0) + float(number) for key, number in found.items()}
    total.backward()
    losses.append(total.item())
    assert table.grad is not None
    table.data -= table.grad
    return StepResult(True, total.item(), float(table.grad.norm()), sums)
