"""A reward model's step: against a slow loop and TRL's loss, and the scale that it keeps for served models."""

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
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.roles import Roles
from learner.objectives.reward_model import RewardModelling, _held_out_means, pair_loss
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.objectives.slow_policy_gradient import V, batch_of, trajectories

MARGINS = (0.25, 0.0, 1.5)


class TableRewards:
    """A reward model that is a table: a text's reward is that of its last token, plus its length over 10."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.losses: list[float] = []
        self.scale: tuple[float, float] | None = None

    def rewards(self, micro_batch: MicroBatch) -> Tensor:
        lengths = torch.tensor(micro_batch.lengths)
        return self.table[micro_batch.tokens[0][lengths.cumsum(0) - 1]] + lengths.double() / 10

    def step(
        self, micro_batches: Sequence[MicroBatch], loss: LossFunction, weight: float, *, with_entropy: bool
    ) -> StepResult:
        found = [loss(self.rewards(each), torch.zeros(()), each) for each in micro_batches]
        total = torch.stack([each for each, _ in found]).sum() / weight
        (gradient,) = torch.autograd.grad(total, self.table)
        self.table.data -= gradient
        self.losses.append(total.item())
        sums = {name: sum(float(each[name]) for _, each in found) for name in found[0][1]}
        return StepResult(True, total.item(), 0.0, sums)


def pairs() -> list[Trajectory]:
    made = []
    for i, each in enumerate(trajectories()[:6]):
        reward = -1.0 if i % 2 else 1.0 + MARGINS[i // 2]
        made.append(replace(each, facts=msgspec.structs.replace(each.facts, reward=reward)))
    return made


def table() -> Tensor:
    return torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def objective_of(
    engine: TableRewards, center: float, memory: dict[str, float], model: Path = Path(), **sections: Any
) -> RewardModelling:
    given = {"objective": "reward_model", "preference": {"center_coefficient": center}, **sections}
    roles = Roles(cast(Any, engine), memory=memory)
    return RewardModelling(roles, Settings.model_validate(given), model, lambda sums: sums)


@pytest.mark.parametrize("center", [0.0, 0.02])
def test_step_follows_the_gradient_of_a_slow_loop_however_pairs_are_packed(center: float) -> None:
    made, slow = pairs(), table()
    expected = torch.zeros((), dtype=torch.float64)
    for pair, margin in enumerate(MARGINS):
        better, worse = (slow[int(each.tokens[-1])] + len(each.tokens) / 10 for each in made[2 * pair : 2 * pair + 2])
        expected = expected + torch.log(1 + torch.exp(worse + margin - better)) / 3
        expected = expected + center * (better + worse) ** 2 / 3
    (gradient,) = torch.autograd.grad(expected, slow)
    for packed in ([[0, 1, 2, 3, 4, 5]], [[2, 3], [0, 1, 4, 5]], [[4, 5], [], [0, 1], [2, 3]]):
        engine = TableRewards(table())
        batch = batch_of(made, packed, list(range(6)), group_size=2, sizes=[len(packed)])
        objective_of(engine, center, {}).take_step(batch, dict(enumerate(made)), 0)
        assert engine.losses == pytest.approx([expected.item()], abs=1e-9)
        assert torch.allclose(engine.table.detach(), slow.detach() - gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("margins", "center", "loss"),
    [
        ((0.0,) * 3, 0.0, 0.664186954498291),
        ((0.0,) * 3, 0.01, 0.6804369688034058),
        (MARGINS, 0.0, 0.7459587454795837),
        (MARGINS, 0.01, 0.7622087597846985),
    ],
)
def test_loss_is_that_of_trl_1_16_for_the_same_rewards(margins: Sequence[float], center: float, loss: float) -> None:
    """The numbers are of RewardTrainer.compute_loss."""
    mask, tokens = np.array([False, True]), np.zeros(2, np.int32)
    stated = [reward for margin in margins for reward in (1.0 + margin, -1.0)]
    samples = [LearnerSample(tokens, mask, np.zeros(2, np.float32), each, number=i) for i, each in enumerate(stated)]
    rewards = torch.tensor([0.5, 0.75, -1.25, -0.5, 2.0, -1.5])
    found, sums = pair_loss(center, rewards, torch.zeros(()), make_micro_batch(samples))
    assert float(found) / 3 == pytest.approx(loss, abs=1e-6)
    assert float(sums["preference/accuracy"]) == 1
    _, ties = pair_loss(center, torch.zeros(6), torch.zeros(()), make_micro_batch(samples))
    assert float(ties["preference/accuracy"]) == 0
    means = _held_out_means({**sums, "loss": found})
    assert float(means["reward_mean"]) == pytest.approx(rewards.mean().item())
    assert float(means["reward_std"]) == pytest.approx(rewards.std(correction=0).item(), rel=1e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("every_steps", "scale"), [(5, (0.5, 2.0)), (0, None)])
def test_resumed_run_keeps_the_scale_of_held_out_rewards_while_it_measures_them(
    every_steps: int, scale: Any, tmp_path: Path
) -> None:
    engine, memory = TableRewards(table()), {"held_out_reward_mean": 0.5, "held_out_reward_std": 2.0}
    make_tiny_model(tmp_path, tied=True)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    data = {"eval": str(tmp_path / "rows.jsonl")}
    objective_of(engine, 0.0, memory, tmp_path, eval={"every_steps": every_steps}, data=data)
    assert (engine.scale, bool(memory)) == (scale, scale is not None)


def test_resumed_run_without_held_out_rows_drops_their_scale() -> None:
    engine = TableRewards(table())
    objective_of(engine, 0.0, {"held_out_reward_mean": 0.5, "held_out_reward_std": 2.0})
    assert engine.scale is None
