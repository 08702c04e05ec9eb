"""What stands between rewards and updates: token rewards, KL, advantages along the tokens, truncated answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from learner.models.micro_batch import MicroBatch
from learner.models.roles import Roles
from learner.objectives.advantages import ReferenceKl
from learner.objectives.policy_gradient import PolicyGradient, make_loss
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Trajectory, TurnReward
from tests.learner.objectives.slow_policy_gradient import REWARDS, batch_of, slow_advantage, trajectories

PLAN = [[8, 0, 3], [1, 2], [4, 5, 6, 7]]
BETA, GAMMA, LAM = 0.1, 0.9, 0.8


class Scripted:
    """Policy, reference and critic: numbers that depend on the token alone."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        return -self.factor * (1.0 + micro_batch.targets.float())

    def values(self, micro_batch: MicroBatch) -> Tensor:
        return self.factor * micro_batch.targets.float()

    def in_use(self) -> "Scripted":
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def prepared(made: Sequence[Trajectory], **sections: Any) -> list[MicroBatch]:
    settings = Settings.model_validate(sections)
    needs_critic = settings.learner.recipe == "ppo"
    roles = Roles(
        cast(Any, Scripted(0.5)),
        cast(Any, Scripted(0.25)) if needs_critic else None,
        cast(Any, Scripted(0.3)) if settings.kl.coefficient else None,
    )
    objective = PolicyGradient(roles, settings, lambda sums: sums)
    return objective.prepare(batch_of(made, PLAN, list(range(9))), dict(enumerate(made)), 4)[1]


def by_trajectory(micro_batches: Sequence[MicroBatch], column: str) -> dict[int, list[float]]:
    found = {}
    for each in micro_batches:
        parts = torch.split(getattr(each, column), list(each.counts))
        found |= {number: part.tolist() for number, part in zip(each.numbers, parts, strict=True)}
    return found


def written(trajectory: Trajectory) -> list[int]:
    return [int(token) for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask]


def slow_kl(token: int) -> float:
    return (0.3 - 0.5) * (1.0 + token)


def slow_gae(trajectory: Trajectory, reward: float) -> list[float]:
    tokens = written(trajectory)
    found, following, behind = [], 0.0, 0.0
    for place in reversed(range(len(tokens))):
        at_token = -BETA * slow_kl(tokens[place]) + (reward if place == len(tokens) - 1 else 0.0)
        value = 0.25 * tokens[place]
        behind = at_token + GAMMA * following - value + GAMMA * LAM * behind
        following = value
        found.append(behind)
    return found[::-1]


PPO = {
    "learner": {"recipe": "ppo", "gamma": GAMMA, "gae_lambda": LAM, "whiten": False},
    "kl": {"coefficient": BETA, "place": "reward", "form": "k1"},
    "rewards": {"clip": None},
}


def test_gae_is_of_rewards_less_the_kl_with_the_score_at_the_last_model_token() -> None:
    made = trajectories()
    rewards = [reward for group in REWARDS for reward in group]
    micro_batches = prepared(made, **PPO)
    advantages, returns = by_trajectory(micro_batches, "advantages"), by_trajectory(micro_batches, "returns")
    for number, trajectory in enumerate(made):
        slow = slow_gae(trajectory, rewards[number])
        assert advantages[number] == pytest.approx(slow, rel=1e-6)
        values = [0.25 * token for token in written(trajectory)]
        assert returns[number] == pytest.approx([a + v for a, v in zip(slow, values, strict=True)], rel=1e-6)


@pytest.mark.parametrize("credit", ["conversation", "turn"])
def test_rewards_of_turns_stand_at_their_ends_where_settings_say_so(credit: str) -> None:
    made = []
    for trajectory in trajectories():
        turn = TurnReward(trajectory.facts.version_spans[0].end, 3.0)
        made.append(replace(trajectory, facts=msgspec.structs.replace(trajectory.facts, turn_rewards=[turn])))
    learner = {"recipe": "ppo", "gamma": 1.0, "gae_lambda": 1.0, "whiten": False}
    rewards = {"clip": None, "credit": credit}
    micro_batches = prepared(made, learner=learner, rewards=rewards, kl={"coefficient": 0.0})
    returns = by_trajectory(micro_batches, "returns")
    for number, trajectory in enumerate(made):
        span = trajectory.facts.version_spans[0]
        first, reward = span.end - span.start, trajectory.facts.reward
        # What is still to come: behind the first turn its reward is no more.
        behind = reward - 3.0 if credit == "turn" else reward
        expected = [reward] * first + [behind] * (len(returns[number]) - first)
        assert returns[number] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_advantages_are_whitened_over_all_tokens_and_returns_are_not() -> None:
    made = trajectories()
    plain = prepared(made, **PPO)
    white = prepared(made, **{**PPO, "learner": {**PPO["learner"], "whiten": True}})
    together = torch.cat([each.advantages for each in plain]).double()
    expected = (together - together.mean()) / (together.var() + 1e-8).sqrt()
    torch.testing.assert_close(torch.cat([each.advantages for each in white]).double(), expected, rtol=1e-5, atol=1e-6)
    assert by_trajectory(white, "returns") == by_trajectory(plain, "returns")


def test_groups_are_compared_by_rewards_less_the_kl_of_their_whole_trajectories() -> None:
    made = trajectories()
    kl = {"coefficient": BETA, "place": "reward", "form": "k1"}
    advantages = by_trajectory(prepared(made, learner={"advantage": "dr_grpo"}, kl=kl), "advantages")
    for group in range(3):
        numbers = range(3 * group, 3 * group + 3)
        totals = [REWARDS[group][n % 3] - BETA * sum(slow_kl(t) for t in written(made[n])) for n in numbers]
        for place, number in enumerate(numbers):
            slow = slow_advantage("dr_grpo", totals, place)
            assert advantages[number] == pytest.approx([slow] * len(written(made[number])), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("learner", [{"advantage": "dr_grpo"}, {**PPO["learner"], "whiten": True}])
def test_teacher_adds_its_judgement_of_each_token_to_the_advantages_of_rewards_alone(learner: dict[str, Any]) -> None:
    made, rewards = trajectories(), {"clip": None}
    kl = {"coefficient": 0.5, "place": "advantage", "form": "k1"}
    plain = prepared(made, learner=learner, rewards=rewards, kl={"coefficient": 0.0})
    taught = prepared(made, learner=learner, rewards=rewards, kl=kl)
    before, after = by_trajectory(plain, "advantages"), by_trajectory(taught, "advantages")
    for number, trajectory in enumerate(made):
        pairs = zip(before[number], written(trajectory), strict=True)
        expected = [advantage + 0.5 * (-0.3 * (1 + token) + 0.5 * (1 + token)) for advantage, token in pairs]
        assert after[number] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    if "recipe" in learner:
        assert by_trajectory(taught, "returns") == by_trajectory(plain, "returns")
    loss, _ = make_loss(settings := Settings.model_validate({"learner": learner, "kl": kl}))(*_step(taught[0]))
    with_kl, _ = make_loss(settings, ReferenceKl(settings.kl, {}))(*_step(taught[0]))
    assert float(with_kl) == float(loss)


def _step(micro_batch: MicroBatch) -> tuple[Tensor, Tensor, MicroBatch]:
    return micro_batch.behaviour_logprobs - 0.1, torch.zeros_like(micro_batch.behaviour_logprobs), micro_batch


def test_kl_in_the_loss_adds_its_gradient_and_weight_to_every_token() -> None:
    made = trajectories()
    learner = {"advantage": "dr_grpo", "loss": "reinforce", "correction": "none"}
    settings = {"learner": learner, "loss": {"aggregate": "token_mean"}}
    with_kl = Settings.model_validate({**settings, "kl": {"coefficient": BETA, "place": "loss", "form": "k2"}})
    memory: dict[str, float] = {}
    for micro_batch in prepared(made, **with_kl.model_dump(include={"learner", "loss", "kl"}, exclude_unset=True)):
        logprobs = (micro_batch.behaviour_logprobs.double() - 0.1).requires_grad_()
        entropies = torch.zeros_like(logprobs)
        plain, _ = make_loss(with_kl)(logprobs, entropies, micro_batch)
        loss, sums = make_loss(with_kl, ReferenceKl(with_kl.kl, memory))(logprobs, entropies, micro_batch)
        assert micro_batch.reference_logprobs is not None
        d = logprobs.detach() - micro_batch.reference_logprobs
        (gradient,) = torch.autograd.grad(loss - plain, logprobs)
        torch.testing.assert_close(gradient, BETA * d, rtol=1e-6, atol=1e-9)
        assert float(sums["reference_kl"]) == pytest.approx(float((d**2 / 2).sum()), rel=1e-6)


def test_truncated_answers_that_are_masked_weigh_nothing_and_the_others_weigh_as_without_them() -> None:
    made = trajectories()
    made[1] = replace(made[1], facts=msgspec.structs.replace(made[1].facts, finish="length"))
    micro_batches = prepared(made, rewards={"truncated": "mask"}, loss={"aggregate": "seq_mean_token_mean"})
    weights = by_trajectory(micro_batches, "weights")
    counts = [len(written(trajectory)) for trajectory in made]
    total = sum(counts) - counts[1]
    for number, count in enumerate(counts):
        expected = 0.0 if number == 1 else total / (8 * count)
        assert weights[number] == pytest.approx([expected] * count, rel=1e-6)


def test_step_of_masked_answers_alone_has_no_trained_tokens_and_no_weight() -> None:
    made = [replace(each, facts=msgspec.structs.replace(each.facts, finish="length")) for each in trajectories()]
    settings = Settings.model_validate({"rewards": {"truncated": "mask"}})
    objective = PolicyGradient(Roles(cast(Any, Scripted(0.5))), settings, lambda sums: sums)
    plan, micro_batches = objective.prepare(batch_of(made, PLAN, list(range(9))), dict(enumerate(made)), 4)
    assert [(update.num_model_tokens, update.divisor) for update in plan.updates] == [(0, 1)]
    assert all(float(each.weights.abs().sum()) == 0.0 for each in micro_batches)
