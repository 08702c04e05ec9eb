"""Settings of the critic, of ZeRO stages and of several updates in a step."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings
from protocol.settings.zero_stage import zero_stage_of


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(given)
    return str(caught.value.errors()[0]["msg"])


def test_critics_optimizer_is_kept_off_the_device_at_a_zero_stage_that_can() -> None:
    problem = refusal({"critic": {"offload": True, "zero_stage": 0}})
    assert problem == "Value error, offload = true needs zero_stage 2 or 3: at 0 every rank holds the whole optimizer."
    problem = refusal({"critic": {"offload": True}, "learner": {"zero_stage": 0}})
    assert problem == (
        "Value error, critic.offload = true needs ZeRO stage 2 or 3, and learner.zero_stage is 0. "
        "Set critic.zero_stage."
    )
    assert Settings.model_validate({"critic": {"offload": True, "zero_stage": 2}}).critic.offload


def test_more_mini_batches_than_groups_are_refused() -> None:
    assert refusal({"learner": {"num_mini_batches": 5, "groups_per_step": 4}}) == (
        "Value error, learner.num_mini_batches = 5 is more than learner.groups_per_step = 4: a mini-batch is made of "
        "whole groups. Lower the first or raise the second."
    )


def test_bfloat16_runs_at_a_zero_stage_whose_state_can_be_saved() -> None:
    assert [zero_stage_of(stage, "bfloat16") for stage in (0, 1, 2, 3)] == [2, 2, 2, 3]
    assert [zero_stage_of(stage, "float32") for stage in (0, 1, 2, 3)] == [0, 1, 2, 3]
