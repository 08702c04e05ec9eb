"""Distillation: the divergence against a slow loop and TRL's loss, and steps however rows are packed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from learner.models.gradient import StepResult
from learner.models.micro_batch import MicroBatch
from learner.models.roles import Roles
from learner.objectives.distill import Distillation, divergence
from protocol.settings.settings import Settings
from tests.learner.objectives.slow_policy_gradient import V, batch_of, table, trajectories

pytestmark = pytest.mark.usefixtures("one_rank")


def slow_divergence(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Return one token's divergence, entry by entry. student, teacher: [V]."""

    def shares(logits: Tensor) -> list[Tensor]:
        powers = [torch.exp(each / temperature) for each in logits]
        return [power / torch.stack(powers).sum() for power in powers]

    total = torch.zeros((), dtype=torch.float64)
    for own, taught in zip(shares(student), shares(teacher.detach()), strict=True):
        if beta == 0.0:
            total = total + taught * torch.log(taught / own)
        elif beta == 1.0:
            total = total + own * torch.log(own / taught)
        else:
            mixed = (1 - beta) * own + beta * taught
            total = total + beta * taught * torch.log(taught / mixed) + (1 - beta) * own * torch.log(own / mixed)
    return total


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_divergence_and_its_gradient_are_those_of_a_slow_loop(beta: float, temperature: float) -> None:
    student, slow, teacher = table(seed=1)[:4], table(seed=1)[:4], table(seed=2)[:4]
    found, expected = (each.detach().requires_grad_() for each in (student, slow))
    losses = divergence(found, teacher, beta, temperature)
    loop = torch.stack([slow_divergence(*pair, beta, temperature) for pair in zip(expected, teacher, strict=True)])
    torch.testing.assert_close(losses, loop, rtol=0.0, atol=1e-9)
    gradients = [torch.autograd.grad(each.sum(), logits)[0] for each, logits in ((losses, found), (loop, expected))]
    torch.testing.assert_close(*gradients, rtol=0.0, atol=1e-9)


def test_divergence_from_equal_logits_is_0_and_the_teacher_gets_no_gradient() -> None:
    logits, teacher = table(seed=1), table(seed=1)
    losses = divergence(logits, teacher, 0.3, 1.0)
    assert float(losses.detach().abs().max()) < 1e-12
    losses.sum().backward()
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("beta", "temperature", "expected"),
    [
        (0.0, 1.0, 1.2281700634901356),
        (0.0, 2.0, 0.40781120469674026),
        (0.3, 1.0, 0.2022527696464096),
        (0.3, 2.0, 0.08010045558393453),
        (0.5, 1.0, 0.23257731277054755),
        (1.0, 1.0, 1.213514805734727),
        (1.0, 2.0, 0.41350567552984063),
    ],
)
def test_divergence_is_that_of_trl_1_16(beta: float, temperature: float, expected: float) -> None:
    """The numbers are of GKDTrainer.generalized_jsd_loss on these logits in float64."""
    places = torch.arange(35, dtype=torch.float64).reshape(5, 7)
    student, teacher = 2 * torch.sin(places), 2 * torch.cos(3 * places)
    assert float(divergence(student, teacher, beta, temperature).mean()) == pytest.approx(expected, abs=1e-6)


class Table:
    """A student or teacher that is a table of logits by the token before."""

    def __init__(self, logits: Tensor) -> None:
        self.table = logits

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        return self.table[micro_batch.tokens[0][micro_batch.predict_at]]

    def step_of_logits(
        self, parts: Sequence[MicroBatch], teacher: Callable[[MicroBatch], Tensor], loss: Any, weight: float
    ) -> StepResult:
        total = sum(loss(self.logits(each), teacher(each), each)[0] for each in parts) / weight
        total.backward()
        return StepResult(True, float(total.detach()), 0.0, {})


@pytest.mark.parametrize("packed", [[[8, 0, 3], [1, 2], [4, 5, 6, 7]], [[index] for index in range(9)]])
def test_step_has_the_loss_and_gradient_of_a_slow_loop_however_it_is_packed(packed: list[list[int]]) -> None:
    """The teacher has two entries of padding more than the student."""
    made, found, expected = trajectories(), table(seed=1), table(seed=1)
    teacher = torch.randn(V, V + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    given = {"beta": 0.3, "temperature": 2.0, "nll_coefficient": 0.25}
    settings = Settings.model_validate({"objective": "distill", "reference": {"model": "teacher"}, "distill": given})
    roles = Roles(cast(Any, Table(found)), reference=cast(Any, Table(teacher)))
    objective = Distillation(roles, settings, Path(), lambda sums: sums)
    outcome = objective.take_step(batch_of(made, packed, list(range(9))), dict(enumerate(made)), 4)

    losses = [
        slow_divergence(expected[before], teacher[before, :V], 0.3, 2.0)
        - 0.25 * expected[before].log_softmax(-1)[token]
        for one in made
        for before, token, is_learnt in zip(one.tokens[:-1], one.tokens[1:], one.loss_mask[1:], strict=True)
        if is_learnt
    ]
    slow = torch.stack(losses).mean()
    slow.backward()
    assert outcome.metrics["policy/loss"] == pytest.approx(slow.item(), abs=1e-9)
    torch.testing.assert_close(found.grad, expected.grad, rtol=0.0, atol=1e-9)
