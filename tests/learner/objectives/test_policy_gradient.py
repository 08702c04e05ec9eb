"""What a step really trains on: PolicyGradient.prepare and its loss against a slow loop over tokens, in float64."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from learner.models.gradient import StepResult, Sums
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.roles import Roles
from learner.objectives.policy_gradient import PolicyGradient, make_loss
from learner.objectives.step_metrics import step_metrics
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch, MiniBatch
from protocol.wire.trajectory import Trajectory
from tests.learner.objectives.slow_policy_gradient import batch_of, slow_loss, table, trajectories
from tests.learner.objectives.table_model import TableModel, logprobs_of

PLAN = [[8, 0, 3], [1, 2], [4, 5, 6, 7]]
CASES = [
    (recipe, loss, correction, old)
    for recipe in ("grpo", "dr_grpo", "rloo")
    for loss in ("ppo", "reinforce")
    for correction in ("none", "tis", "icepop")
    for old in ("behaviour", "recompute")
]


def settings_of(old_logprobs: str = "behaviour", **learner: Any) -> Settings:
    """Return settings with every file of algorithms named by itself."""
    clip = {} if learner.get("loss") == "reinforce" else {"clip_low": 0.2, "clip_high": 0.3}
    return Settings.model_validate(
        {"learner": clip | learner, "policy": {"old_logprobs": old_logprobs}, "loss": {"aggregate": "token_mean"}}
    )


def objective_of(settings: Settings, model: TableModel | None = None) -> PolicyGradient:
    return PolicyGradient(Roles(cast(PolicyEngine, model or TableModel(table()))), settings, lambda sums: sums)


def loss_of(batch: Batch, made: Mapping[int, Trajectory], settings: Settings, logits: Tensor) -> Tensor:
    """Return the loss of a step's one update."""
    plan, micro_batches = objective_of(settings).prepare(batch, made, 4)
    total, loss = torch.zeros((), dtype=torch.float64), make_loss(settings)
    for micro_batch in micro_batches:
        logprobs = logprobs_of(logits, micro_batch)
        total = total + loss(logprobs, torch.zeros_like(logprobs), micro_batch)[0]
    return total / plan.updates[0].num_model_tokens


@pytest.mark.parametrize(("advantage", "loss", "correction", "old_logprobs"), CASES)
def test_step_has_the_loss_and_gradient_of_the_slow_loop(
    advantage: str, loss: str, correction: str, old_logprobs: str
) -> None:
    made, found, expected = trajectories(), table(), table()
    settings = settings_of(old_logprobs, advantage=advantage, loss=loss, correction=correction)
    ours, slow = (
        loss_of(batch_of(made, PLAN, list(range(9))), dict(enumerate(made)), settings, found),
        slow_loss(expected, made, range(9), advantage, loss=loss, correction=correction, old_logprobs=old_logprobs),
    )
    ours.backward()
    slow.backward()
    assert ours.item() == pytest.approx(slow.item(), rel=1e-6, abs=1e-7)
    assert found.grad is not None
    assert expected.grad is not None
    assert float(expected.grad.norm()) > 1e-2
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-6, atol=1e-7)


def test_step_of_some_groups_has_the_advantages_of_all_and_the_tokens_of_the_planned() -> None:
    """Groups without spread are left out of the plan; another rank's trajectories are not there at all."""
    made, logits = trajectories(), table()
    mine = {index: made[index] for index in (0, 3, 4)}
    batch = batch_of(made, [[0, 3], [4]], [0, 1, 2, 3, 4, 5])
    counts = [int(trajectory.loss_mask.sum()) for trajectory in made]
    how = {"loss": "ppo", "correction": "tis", "old_logprobs": "behaviour"}
    own = slow_loss(logits, made, (0, 3, 4), "grpo", **how) * (counts[0] + counts[3] + counts[4])
    assert loss_of(batch, mine, settings_of(), logits).item() == pytest.approx(own.item() / sum(counts[:6]), rel=1e-6)


def test_better_sample_becomes_likelier_and_the_worse_one_less_likely() -> None:
    """The direction in plain sight: after a small step down the loss. The two samples share no token."""
    made, logits = trajectories(), table()
    made[0] = replace(made[0], tokens=made[0].tokens % 3)
    made[1] = replace(made[1], tokens=made[1].tokens % 3 + 3)
    batch, settings = batch_of(made, [[0], [1]], [0, 1]), settings_of(loss="reinforce")
    loss_of(batch, dict(enumerate(made)), settings, logits).backward()
    assert logits.grad is not None
    before, after = logits.detach(), (logits - 1e-3 * logits.grad).detach()
    parts = objective_of(settings).prepare(batch, dict(enumerate(made)), 4)[1]
    better, worse = (float((logprobs_of(after, part) - logprobs_of(before, part)).sum()) for part in parts)
    assert better > 0.0 > worse


# -- several updates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old_logprobs", ["behaviour", "recompute"])
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_updates_of_a_step_share_its_advantages_and_its_old_logprobs(old_logprobs: str, num_epochs: int) -> None:
    """Three mini-batches of a group each: every update's loss is of the weights that the one before it left."""
    made = trajectories()
    batch = msgspec.structs.replace(
        batch_of(made, [[1, 0], [2], [4, 5, 3], [8, 6, 7]], [1, 0, 2, 4, 5, 3, 8, 6, 7]),
        mini_batches=[
            MiniBatch(num_planned=3, num_micro_batches=2),
            MiniBatch(num_planned=3, num_micro_batches=1),
            MiniBatch(num_planned=3, num_micro_batches=1),
        ],
    )
    settings = settings_of(
        old_logprobs, advantage="rloo", loss="ppo", correction="tis", num_mini_batches=3, num_epochs=num_epochs
    )
    model, logits = TableModel(table()), table()
    objective_of(settings, model).take_step(batch, dict(enumerate(made)), 4)
    first, expected = logits.detach().clone(), []
    how = {"loss": "ppo", "correction": "tis", "old_logprobs": old_logprobs}
    for _ in range(num_epochs):
        for group in range(3):
            slow = slow_loss(logits, made, range(3 * group, 3 * group + 3), "rloo", before=first, **how)
            (gradient,) = torch.autograd.grad(slow, logits)
            logits.data -= gradient
            expected.append(slow.item())
    assert len(set(expected)) == 2 * num_epochs + 1  # the last group says nothing
    assert model.losses == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model.logits, logits, rtol=1e-6, atol=1e-7)


def test_metrics_of_several_updates_compare_the_sampler_with_the_learner_before_the_step() -> None:
    made = trajectories()
    batch = msgspec.structs.replace(
        batch_of(made, [[0, 1, 2], [3, 4, 5, 6, 7, 8]], list(range(9))),
        mini_batches=[MiniBatch(num_planned=3, num_micro_batches=1), MiniBatch(num_planned=6, num_micro_batches=1)],
    )
    one = objective_of(settings_of("recompute")).take_step(
        batch_of(made, PLAN, list(range(9))), dict(enumerate(made)), 4
    )
    settings = settings_of("recompute", num_mini_batches=2, num_epochs=3)
    several = objective_of(settings).take_step(batch, dict(enumerate(made)), 4)
    for key in (
        "policy/kl_sampler",
        "policy/ratio_mean",
        "policy/ratio_outside_share",
        "policy/effective_sample_share",
    ):
        assert several.metrics[key] == pytest.approx(one.metrics[key], rel=1e-6)
    assert (one.metrics["policy/num_updates"], several.metrics["policy/num_updates"]) == (1, 6)
    assert several.metrics["data/num_trained_tokens"] == one.metrics["data/num_trained_tokens"]


def test_step_whose_answers_are_all_masked_counts_no_trained_tokens() -> None:
    made = [replace(each, facts=msgspec.structs.replace(each.facts, finish="length")) for each in trajectories()]
    masked = settings_of("behaviour").model_dump(exclude_unset=True) | {"rewards": {"truncated": "mask"}}
    objective = objective_of(Settings.model_validate(masked))
    outcome = objective.take_step(batch_of(made, PLAN, list(range(9))), dict(enumerate(made)), 4)
    assert outcome.metrics["data/num_trained_tokens"] == 0


# -- PPO as in its paper ----------------------------------------------------------------------------------------------

RATIOS = [0.55, 0.9, 1.0, 1.1, 1.19, 1.5, 1.9, 2.5]


def gradient_at(ratios: list[float], advantage: float, **learner: Any) -> list[float]:
    """Return d loss / d logp of each token, at these ratios of the learner to the behaviour policy."""
    count = len(ratios)
    behaviour = np.array([0.0] + [-1.0] * count, np.float32)
    mask = np.array([False] + [True] * count)
    micro_batch = make_micro_batch([LearnerSample(np.zeros(count + 1, np.int32), mask, behaviour, advantage)])
    logprobs = (torch.tensor(ratios, dtype=torch.float64).log() - 1.0).requires_grad_()
    settings = (
        settings_of(clip_high=0.2, loss="ppo", **learner) if "clip_high" not in learner else settings_of(**learner)
    )
    make_loss(settings)(logprobs, torch.zeros(count), micro_batch)[0].backward()
    assert logprobs.grad is not None
    found: list[float] = logprobs.grad.tolist()
    return found


@pytest.mark.parametrize(
    ("correction", "advantage", "expected"),
    [
        ("none", 1.0, [-0.55, -0.9, -1.0, -1.1, -1.19, 0.0, 0.0, 0.0]),
        ("none", -1.0, [0.0, 0.9, 1.0, 1.1, 1.19, 1.5, 1.9, 2.5]),
        ("tis", 1.0, [-0.55, -0.9, -1.0, -1.1, -1.19, 0.0, 0.0, 0.0]),
        ("tis", -1.0, [0.0, 0.9, 1.0, 1.1, 1.19, 1.5, 1.9, 2.0]),
        ("icepop", 1.0, [-0.55, -0.9, -1.0, -1.1, -1.19, 0.0, 0.0, 0.0]),
        ("icepop", -1.0, [0.0, 0.9, 1.0, 1.1, 1.19, 1.5, 1.9, 0.0]),
    ],
)
def test_ppo_without_a_correction_is_equation_7_and_a_correction_only_cuts(
    correction: str, advantage: float, expected: list[float]
) -> None:
    assert gradient_at(RATIOS, advantage, correction=correction) == pytest.approx(expected, rel=1e-6)


def test_settings_of_clip_and_correction_reach_the_loss() -> None:
    wide = gradient_at([1.9, 2.5], 1.0, correction="none", clip_high=1.0)
    assert wide == pytest.approx([-1.9, 0.0], rel=1e-6)
    assert gradient_at([2.5], -1.0, correction="none", dual_clip=2.0) == [0.0]
    assert gradient_at([1.9], -1.0, correction="tis", correction_high=1.5) == pytest.approx([1.5], rel=1e-6)
    assert gradient_at([0.9], -1.0, correction="icepop", correction_low=0.95) == [0.0]


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_means_over_the_tokens_of_the_learner_against_the_behaviour_policy() -> None:
    micro_batch = make_micro_batch(
        [
            LearnerSample(
                np.zeros(5, np.int32),
                np.array([False, True, True, True, True]),
                np.array([0.0, -1.0, -1.0, -2.0, -0.5], np.float32),
                advantage=1.0,
            )
        ]
    )
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.05], dtype=torch.float64)
    logprobs = micro_batch.behaviour_logprobs.double() + ratios.log()
    entropies = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    _, sums = make_loss(settings_of(loss="ppo"))(logprobs, entropies, micro_batch)
    result = StepResult(True, -0.25, 0.75, {key: float(value) for key, value in sums.items()}, lr=0.125)
    metrics = step_metrics([result], [result])
    kl = sum(ratio - 1.0 - np.log(ratio) for ratio in ratios.tolist()) / 4
    assert metrics == pytest.approx(
        {
            "policy/loss": -0.25,
            "policy/grad_norm": 0.75,
            "policy/kl_sampler": kl,
            "policy/entropy": 3.0,
            "policy/ratio_mean": 4.05 / 4,
            "policy/clip_share": 0.25,
            "policy/ratio_outside_share": 0.5,
            "policy/effective_sample_share": 4.05**2 / (4 * (1.0 + 2.25 + 0.25 + 1.1025)),
            "policy/logprob_difference_max": np.log(2.0),
            "policy/num_updates": 1,
            "policy/lr": 0.125,
            "policy/kl_fresh": kl,
            "policy/advantage_std": 0.0,
        },
        rel=1e-6,
    )


def test_micro_batch_without_tokens_sums_to_zeros_under_the_same_keys() -> None:
    loss = make_loss(settings_of())
    value, sums = loss(torch.zeros(0, requires_grad=True), torch.zeros(0), make_micro_batch([]))
    _, full = loss(torch.zeros(1), torch.zeros(1), batch_of_one_token())
    assert value.item() == 0.0
    assert sums.keys() == full.keys()
    assert {float(number) for number in sums.values()} == {0.0}
    result = StepResult(True, 0.0, 0.0, numbers(sums))
    assert step_metrics([result], [result])["policy/entropy"] == 0.0


def batch_of_one_token() -> MicroBatch:
    return make_micro_batch([LearnerSample(np.zeros(2, np.int32), np.array([False, True]), np.zeros(2, np.float32))])


def numbers(sums: Sums) -> dict[str, float]:
    return {key: float(value) for key, value in sums.items()}
