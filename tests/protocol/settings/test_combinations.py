"""Settings that cannot go together are refused, with what to change."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings
from tests.protocol.settings.refusal import refusal


def test_settings_refuse_groups_that_cannot_be_split_over_the_ranks() -> None:
    assert refusal(learner={"groups_per_step": 6, "num_ranks": 4}) == [
        (
            "",
            "Value error, learner.groups_per_step = 6 cannot be split over 4 ranks. "
            "Use a multiple of 4, or set learner.num_ranks to one of [1, 2, 3, 6].",
        )
    ]


def test_settings_refuse_a_group_of_one() -> None:
    assert refusal(rollout={"group_size": 1}) == [
        (
            "",
            "Value error, rollout.group_size = 1 gives a group nothing to be compared with. "
            "Use at least 2 samples of a prompt, or learner.recipe = ppo or reinforce_pp, which takes single ones.",
        )
    ]


def test_settings_refuse_a_response_that_fills_the_context() -> None:
    assert refusal(rollout={"max_response_tokens": 64, "max_context_tokens": 64}) == [
        (
            "",
            "Value error, rollout.max_response_tokens = 64 leaves no room for a prompt in "
            "rollout.max_context_tokens = 64. Lower the first or raise the second.",
        )
    ]


def test_settings_refuse_two_endpoints_of_one_name() -> None:
    endpoint = {"name": "em", "url": "http://127.0.0.1:1/r"}
    assert refusal(rewards={"endpoints": [endpoint, endpoint]}) == [
        ("", "Value error, rewards.endpoints has the names ['em', 'em']. Give each endpoint a name of its own.")
    ]


def test_settings_refuse_an_evaluation_without_held_out_prompts() -> None:
    assert refusal(eval={"every_steps": 5}) == [
        (
            "",
            "Value error, eval.every_steps = 5 needs held-out prompts. "
            "Set data.eval or eval.sets, or eval.every_steps to 0.",
        )
    ]


def test_settings_refuse_more_samples_in_a_step_than_a_message_names() -> None:
    found = refusal(learner={"groups_per_step": 1024}, rollout={"group_size": 2048})
    assert found == [
        (
            "",
            "Value error, learner.groups_per_step = 1024 times rollout.group_size = 2048 is 2097152 samples in one "
            "step, at most 1048576. Lower one of them.",
        )
    ]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"filter": {"low": 1.0, "high": 0.5}}, "filter.low = 1 and filter.high = 0.5 leave no score between them"),
        (
            {"filter": {"dynamic_sampling": True}, "rollout": {"group_size": 1}, "learner": {"recipe": "dr_grpo"}},
            "Use at least 2 samples of a prompt",
        ),
        (
            {
                "filter": {"dynamic_sampling": True, "score": "f1"},
                "rewards": {"endpoints": [{"name": "em", "url": "http://127.0.0.1:9/r"}]},
            },
            "filter.score = f1 is none of rewards.endpoints (em). Use one of them, environment, or reward",
        ),
        (
            {"filter": {"dynamic_sampling": True, "score": "em"}, "rewards": {"combine": "shard"}},
            "with rewards.combine = shard a sample has one endpoint's part only. Set filter.score to reward.",
        ),
    ],
)
def test_filter_that_cannot_work_is_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(sections)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"eval": {"sets": [{"name": "held_out", "data": "a"}]}}, "Give each set a name of its own."),
        ({"eval": {"best": "eval_reward"}}, "eval.best = eval_reward needs evaluations. Set eval.every_steps"),
        (
            {
                "eval": {"best": "eval_reward", "every_steps": 30},
                "data": {"eval": "a"},
                "learner": {"checkpoint_every_steps": 20},
            },
            "learner.checkpoint_every_steps = 20 not every evaluated step has one. Set the first to a multiple",
        ),
    ],
)
def test_evaluation_that_cannot_work_is_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(sections)
    assert text in str(caught.value)


@pytest.mark.parametrize("changed", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"logit_bias": {5: -1.0}}])
def test_sampling_that_makes_every_ratio_wrong_is_refused_for_training_alone(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"sampling": changed})
    assert f"sampling.{name} = {changed[name]} draws from another distribution than the policy's" in str(caught.value)
    assert Settings.model_validate({"sampling": changed | {"only_eval": True}}).sampling.reshaping == changed
    assert Settings.model_validate({"sampling": changed, "run": {"max_steps": 0}}).sampling.reshaping == changed


def test_stop_strings_are_taken_in_training() -> None:
    assert Settings.model_validate({"sampling": {"stop": ["</answer>"]}}).sampling.stop == ["</answer>"]


@pytest.mark.parametrize(
    ("learner", "text"),
    [
        (
            {"offload": "optimizer"},
            "learner.offload = optimizer needs optimizer state that ranks share. Set learner.ze",
        ),
        ({"offload": "all", "zero_stage": 2}, "learner.offload = all needs learner.zero_stage = 3, and it is 2."),
    ],
)
def test_settings_refuse_what_a_rank_cannot_do_with_its_memory(learner: dict[str, Any], text: str) -> None:
    ((_, said),) = refusal(learner=learner)
    assert text in said


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"policy": {"lora": {"rank": 4}, "warm_start": {"data": "rows.jsonl"}}},
            "policy.lora.rank and policy.warm_start.data are both set",
        ),
        (
            {"rollout": {"engine_args": {"enable_lora": True}}},
            "Remove it: policy.lora needs nothing of the engine",
        ),
        ({"rollout": {"engine_args": {"load_format": "auto"}}}, "load_format has no use: servers start with dummy"),
    ],
)
def test_adapters_that_could_not_be_resumed_or_pushed_are_refused(sections: dict[str, Any], text: str) -> None:
    ((_, problem),) = refusal(**sections)
    assert text in problem


def test_engine_without_adapters_is_accepted() -> None:
    assert Settings.model_validate({"rollout": {"engine_args": {"enable_lora": False}}}).rollout.engine_args
