"""A step's losses and updates are those of a slow loop over tokens, however its trajectories are packed, to 1e-9.

Every loss, correction and aggregation, with both kinds of old logprobs, with and without a critic: answers of several
turns and of one token, a group of equal rewards, groups of one, a rank that has nothing.
"""

from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from learner.models.roles import Roles
from learner.objectives.policy_gradient import PolicyGradient
from protocol.settings.learner import ADVANTAGES, AGGREGATES, CORRECTIONS, LOSSES
from protocol.settings.settings import IS_SAVED, Settings
from tests.learner.objectives import slow_grid as slow
from tests.learner.objectives.table_model import TableCritic, TableModel

PLANS = ([[number] for number in range(len(slow.SHAPES))], [[7, 0, 3], [], [1, 2, 6, 4], [5]])
NUM_UPDATES = 2


def settings_of(how: slow.How) -> Settings:
    given = {
        "clip_low": slow.CLIP_LOW,
        "clip_high": slow.CLIP_HIGH,
        "dual_clip": slow.DUAL,
        "correction_low": slow.LOW,
        "correction_high": slow.HIGH,
        "gamma": slow.GAMMA,
        "gae_lambda": slow.LAM,
    }
    read = {*ADVANTAGES[how.advantage], *LOSSES[how.loss], *CORRECTIONS[how.correction]}
    learner = {
        "recipe": "grpo",
        "advantage": how.advantage,
        "loss": how.loss,
        "correction": how.correction,
        **{name: given[name] for name in read},
        "whiten": False,
        "num_epochs": NUM_UPDATES,
    }
    constant = {"constant": slow.CONSTANT} if how.aggregate == "seq_sum_norm" else {}
    return Settings.model_validate(
        {
            "learner": learner,
            "policy": {"old_logprobs": how.old},
            "critic": {"value_clip": slow.VALUE_CLIP},
            "loss": {"aggregate": how.aggregate, **constant},
            "rollout": {"group_size": 2 if how.advantage == "grpo" else 1},
        },
        context={IS_SAVED: True},  # the grid has combinations that a run refuses
    )


def tables() -> tuple[Tensor, Tensor]:
    """Return logits and values, the same each time."""
    generator = torch.Generator().manual_seed(2)
    logits, values = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((slow.V, slow.V), (slow.V,))
    )
    return logits.requires_grad_(), values.requires_grad_()


def close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_packed_and_unpacked_steps_are_those_of_the_slow_loop(loss: str, correction: str) -> None:
    made = slow.trajectories(tables()[0])
    for number, aggregate in enumerate(AGGREGATES):
        for place, old in enumerate(("behaviour", "recompute")):
            # Each aggregation and each kind of old logprobs meets both, but for gspo: it refuses advantages of tokens.
            advantage = "grpo" if loss == "gspo" else ("grpo", "gae")[(number + place) % 2]
            how = slow.How(advantage, loss, correction, aggregate, old)
            logits, values = tables()
            expected, of_critic = slow.slow_step(made, logits, values, how, NUM_UPDATES)
            for plan in PLANS:
                table, of_values = tables()
                policy, critic = TableModel(table), TableCritic(of_values)
                roles = Roles(cast(Any, policy), cast(Any, critic) if advantage == "gae" else None)
                objective = PolicyGradient(roles, settings_of(how), lambda sums: sums)
                objective.take_step(slow.batch_of(made, advantage, plan), dict(enumerate(made)), 4)
                close(policy.losses, expected)
                close(policy.logits.detach(), logits.detach())
                if advantage == "gae":
                    close(critic.losses, of_critic)
                    close(critic.table.detach(), values.detach())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_step_in_parts_is_that_of_the_slow_loop(loss: str, correction: str) -> None:
    """Groups of two in parts of one, two and one groups."""
    made = slow.trajectories(tables()[0])
    for number, aggregate in enumerate(AGGREGATES):
        how = slow.How("grpo", loss, correction, aggregate, ("behaviour", "recompute")[number % 2])
        logits, values = tables()
        expected, _ = slow.slow_step(made, logits, values, how, 1)
        policy = TableModel(tables()[0])
        given = settings_of(how).model_dump(exclude_unset=True)
        given["learner"]["num_epochs"] = 1
        settings = Settings.model_validate(given, context={IS_SAVED: True})
        objective = PolicyGradient(Roles(cast(Any, policy)), settings, lambda sums: sums)
        for part, of_part in enumerate((made[:2], made[2:6], made[6:])):
            numbers = list(range(len(of_part)))
            batch = slow.batch_of(of_part, "grpo", [numbers[:1], numbers[1:]])
            batch = msgspec.structs.replace(batch, part=part, is_last=part == 2)
            if part < 2:
                objective.take_part(batch, dict(enumerate(of_part)), 4)
            else:
                outcome = objective.take_step(batch, dict(enumerate(of_part)), 4)
        # A part's weights are rounded to float32 before the step's size divides them.
        torch.testing.assert_close(policy.losses, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(policy.logits.detach(), logits.detach(), rtol=1e-6, atol=1e-7)
        num_tokens = sum(int(each.loss_mask.sum()) for each in made)
        assert outcome.metrics["data/num_trained_tokens"] == num_tokens


def test_parts_without_a_trajectory_in_the_loss_add_nothing() -> None:
    """learner.equal_groups = skip leaves out all groups of the first and the last part."""
    made = slow.trajectories(tables()[0])
    how = slow.How("grpo", "ppo", "tis", "token_mean", "behaviour")
    logits, values = tables()
    expected, _ = slow.slow_step(made, logits, values, how, 1)
    given = settings_of(how).model_dump(exclude_unset=True)
    given["learner"] |= {"num_epochs": 1, "equal_groups": "skip"}
    policy = TableModel(tables()[0])
    settings = Settings.model_validate(given, context={IS_SAVED: True})
    objective = PolicyGradient(Roles(cast(Any, policy)), settings, lambda sums: sums)
    whole = slow.batch_of(made, "grpo", [list(range(len(made)))])
    empty = msgspec.structs.replace(whole, planned=[], micro_batches=[[]])
    objective.take_part(msgspec.structs.replace(empty, part=0, is_last=False), {}, 4)
    objective.take_part(msgspec.structs.replace(whole, part=1, is_last=False), dict(enumerate(made)), 4)
    outcome = objective.take_step(msgspec.structs.replace(empty, part=2, is_last=True), {}, 4)
    torch.testing.assert_close(policy.losses, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(policy.logits.detach(), logits.detach(), rtol=1e-6, atol=1e-7)
    assert outcome.metrics["data/num_trained_tokens"] == sum(int(each.loss_mask.sum()) for each in made)
