"""KTO: the step against a slow loop and TRL's loss, packing, updates, and a policy that is its reference."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from learner.models.gradient import LossFunction, StepResult
from learner.models.micro_batch import MicroBatch
from learner.models.roles import Roles
from learner.objectives.kto import Kto
from learner.objectives.policy_gradient import StepOutcome
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.objectives.slow_policy_gradient import batch_of, table, trajectories
from tests.learner.objectives.table_model import TableModel
from tests.learner.objectives.test_preference import TableReference, slow_logp
from tests.protocol.wire.examples import example_facts

pytestmark = pytest.mark.usefixtures("one_rank")

BETA = 0.3
SIGNS = (1, -1, -1, 1)


def rows() -> list[Trajectory]:
    """Return four labelled answers, each followed by its prompt with another answer."""
    made = []
    for i, each in enumerate(trajectories()[:8]):
        reward = 0.0 if i % 2 else float(SIGNS[i // 2])
        facts = msgspec.structs.replace(each.facts, group=f"g{i // 2}", sample_index=i % 2, reward=reward)
        made.append(replace(each, facts=facts))
    return made


def step_of(
    policy: Any, reference: Any, made: Sequence[Trajectory], packed: list[list[int]], sizes: list[int], **changes: Any
) -> StepOutcome:
    """Take a step; sizes: micro-batches of each update."""
    batch = batch_of(made, packed, group_size=2, sizes=sizes)
    given = {"objective": "kto", "preference": {"beta": BETA} | changes}
    objective = Kto(Roles(policy, reference=reference), Settings.model_validate(given), Path(), lambda sums: sums)
    return objective.take_step(batch, dict(enumerate(made)), 0)


def slow_loss(logits: Tensor, before: Tensor, numbers: Sequence[int], w_d: float, w_u: float) -> tuple[Tensor, float]:
    """Return the mean loss of these rows and z, written from the paper's formulas."""
    made = rows()

    def gain(index: int) -> Tensor:
        return slow_logp(logits, made[index])[0] - slow_logp(before, made[index])[0].detach()

    z = max(0.0, sum(float(gain(2 * number + 1).detach()) for number in numbers) / len(numbers))
    total = torch.zeros((), dtype=torch.float64)
    for number in numbers:
        d = gain(2 * number)
        value = 1 / (1 + torch.exp(-BETA * ((d - z) if SIGNS[number] > 0 else (z - d))))
        total = total + (w_d if SIGNS[number] > 0 else w_u) * (1 - value)
    return total / len(numbers), z


@pytest.mark.parametrize("seed", [3, 2])
@pytest.mark.parametrize(("w_d", "w_u"), [(1.0, 1.0), (1.3, 0.6)])
def test_step_follows_the_gradient_of_a_slow_loop_however_rows_are_packed(seed: int, w_d: float, w_u: float) -> None:
    before, slow = table(seed=1), table(seed=seed)
    expected, z = slow_loss(slow, before, range(4), w_d, w_u)
    (gradient,) = torch.autograd.grad(expected, slow)
    for packed in ([[0, 1, 2, 3, 4, 5, 6, 7]], [[2, 3], [0, 1, 6, 7], [4, 5]], [[4, 5, 6, 7], [], [0, 1, 2, 3]]):
        logits = table(seed=seed)
        policy, weights = TableModel(logits), {"desirable_weight": w_d, "undesirable_weight": w_u}
        outcome = step_of(policy, TableReference(before), rows(), packed, [len(packed)], **weights)
        assert policy.losses == pytest.approx([expected.item()], abs=1e-9)
        assert torch.allclose(logits.detach(), slow.detach() - gradient, atol=1e-9, rtol=0)
        assert outcome.metrics["preference/kl"] == pytest.approx(z, abs=1e-9)


def test_slow_loops_have_a_kl_above_0_and_one_that_is_cut() -> None:
    assert [slow_loss(table(seed=seed), table(seed=1), range(4), 1.0, 1.0)[1] > 0 for seed in (3, 2)] == [True, False]


def test_each_update_has_the_kl_and_the_number_of_its_own_rows() -> None:
    before, slow = table(seed=1), table(seed=3)
    losses = []
    for numbers in ([0], [1, 2, 3]):
        expected, _ = slow_loss(slow, before, numbers, 1.0, 1.0)
        (gradient,) = torch.autograd.grad(expected, slow)
        slow = (slow.detach() - gradient).requires_grad_()
        losses.append(expected.item())
    policy = TableModel(table(seed=3))
    step_of(policy, TableReference(before), rows(), [[0, 1], [2, 3, 4, 5], [6, 7]], [1, 2])
    assert policy.losses == pytest.approx(losses, abs=1e-9)
    assert torch.allclose(policy.logits.detach(), slow.detach(), atol=1e-9, rtol=0)


def test_policy_that_is_its_reference_has_a_loss_of_a_half() -> None:
    policy = TableModel(table(seed=1))
    outcome = step_of(policy, TableReference(table(seed=1)), rows(), [[0, 1, 2, 3, 4, 5, 6, 7]], [1])
    assert policy.losses == pytest.approx([0.5], abs=1e-12)
    assert {outcome.metrics[f"preference/{name}"] for name in ("kl", "chosen", "rejected", "margin")} == {0.0}


class Formula:
    """A model whose logprobs are a formula of the row and of the token's place: `own`, and `other` for others' answers.

    A formula (a, b) gives row i at place t the logprob -(1 + (a i + b t) % 5) / 4.
    """

    def __init__(self, own: tuple[int, int], other: tuple[int, int]) -> None:
        self._formulas = own, other
        self.loss = 0.0

    def in_use(self) -> Any:
        return torch.no_grad()

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        found = []
        for number, count in zip(micro_batch.numbers, micro_batch.counts, strict=True):
            a, b = self._formulas[number % 2]
            found += [-(1 + (a * (number // 2) + b * (2 + t)) % 5) / 4 for t in range(count)]
        return torch.tensor(found)

    def step(self, parts: Sequence[MicroBatch], loss: LossFunction, weight: float, **how: bool) -> StepResult:
        found = [loss(self.logprobs(each), torch.zeros(()), each) for each in parts]
        self.loss = sum(float(each) for each, _ in found) / weight
        return StepResult(True, self.loss, 0.0, {name: float(each) for name, each in found[0][1].items()})


@pytest.mark.parametrize(
    ("own", "other", "weights", "loss", "kl", "chosen", "rejected"),
    [
        ((7, 3), (2, 5), (1.0, 1.0), 0.5076802372932434, 0.5, 0.125, 0.1875),
        ((7, 3), (2, 5), (1.3, 0.7), 0.5377541780471802, 0.5, 0.125, 0.1875),
        ((2, 5), (7, 3), (1.0, 1.0), 0.4993637204170227, 0.0, -0.125, -0.1875),
        ((2, 5), (7, 3), (1.3, 0.7), 0.5402927994728088, 0.0, -0.125, -0.1875),
    ],
)
def test_loss_is_that_of_trl_1_16_for_the_same_logprobs(
    own: tuple[int, int],
    other: tuple[int, int],
    weights: tuple[float, float],
    loss: float,
    kl: float,
    chosen: float,
    rejected: float,
) -> None:
    """The numbers are of KTOTrainer._compute_loss, whose batch had these five rows."""
    made = []
    for i, sign in enumerate((1, -1, 1, 1, -1)):
        for index, length in enumerate((1 + i, 1 + (i - 1) % 5)):
            mask = np.array([0] * 3 + [1] * length, np.uint8)
            facts = example_facts(reward=float(sign * (1 - index)), num_tokens=3 + length, num_prompt_tokens=3)
            zeros = np.zeros(3 + length, np.float32)
            made.append(Trajectory(facts, np.zeros(3 + length, np.int32), zeros, mask))
    policy, reference = Formula(own, (own[1], other[0])), Formula(other, (other[1], own[0]))
    changes = {"desirable_weight": weights[0], "undesirable_weight": weights[1]}
    metrics = step_of(policy, cast(Any, reference), made, [list(range(10))], [1], **changes).metrics
    assert policy.loss == pytest.approx(loss, abs=1e-6)
    found = [metrics[f"preference/{name}"] for name in ("kl", "chosen", "rejected")]
    assert found == pytest.approx([kl, chosen, rejected], abs=1e-6)


def test_held_out_answers_are_scored_one_by_one_for_a_model_that_mixes_the_rows_of_a_micro_batch(
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path, tied=True)
    labelled = [{"prompt": f"{i} ?", "completion": " yes" * (i + 1), "label": i == 0} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    sections = {"data": {"eval": str(tmp_path / "rows.jsonl")}, "eval": {"every_steps": 1}}
    settings = Settings.model_validate({"objective": "kto", "learner": {"micro_batch_tokens": 1}, **sections})
    roles = Roles(cast(Any, TableModel(table(seed=1))), reference=cast(Any, TableReference(table(seed=2))))
    micro_batches = Kto(roles, settings, tmp_path, lambda sums: sums)._held_out._micro_batches
    assert sorted(number for each in micro_batches for number in each.numbers) == list(range(6))
    assert [len(each.numbers) for each in micro_batches] == [1] * 6
