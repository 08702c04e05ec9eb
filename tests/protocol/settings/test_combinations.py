"""Settings that cannot go together are refused, with what to change."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings
from tests.protocol.settings.refusal import refusal


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"learner": {"groups_per_step": 6, "num_ranks": 4}},
            "learner.groups_per_step = 6 cannot be split over 4 ranks. "
            "Use a multiple of 4, or set learner.num_ranks to one of [1, 2, 3, 6].",
        ),
        (
            {"learner": {"num_mini_batches": 5, "groups_per_step": 4}},
            "learner.num_mini_batches = 5 is more than learner.groups_per_step = 4: a mini-batch is made of whole "
            "groups. Lower the first or raise the second.",
        ),
        (
            {"rollout": {"max_response_tokens": 64, "max_context_tokens": 64}},
            "rollout.max_response_tokens = 64 leaves no room for a prompt in rollout.max_context_tokens = 64. "
            "Lower the first or raise the second.",
        ),
        (
            {"rewards": {"endpoints": [{"name": "em", "url": "http://127.0.0.1:1/r"}] * 2}},
            "rewards.endpoints has the names ['em', 'em']. Give each endpoint a name of its own.",
        ),
        (
            {"eval": {"every_steps": 5}},
            "eval.every_steps = 5 needs held-out prompts. Set data.eval or eval.sets, or eval.every_steps to 0.",
        ),
        (
            {"learner": {"groups_per_step": 1024}, "rollout": {"group_size": 2048}},
            "learner.groups_per_step = 1024 times rollout.group_size = 2048 is 2097152 samples in one step, at most "
            "1048576. Lower one of them.",
        ),
        ({"filter": {"low": 1.0, "high": 0.5}}, "filter.low = 1 and filter.high = 0.5 leave no score between them"),
        (
            {"filter": {"dynamic_sampling": True}, "rollout": {"group_size": 1}, "learner": {"recipe": "ppo"}},
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
        ({"eval": {"sets": [{"name": "held_out", "data": "a"}]}}, "Give each set a name of its own."),
        ({"eval": {"best": "eval/held_out/reward"}}, "eval.best = eval/held_out/reward needs evaluations"),
        (
            {"eval": {"best": "eval/held_out/reward", "every_steps": 10, "sets": [{"name": "aime", "data": "a"}]}},
            "eval.best = eval/held_out/reward is a metric of data.eval, which is not set. Name a set of eval.sets.",
        ),
        (
            {
                "eval": {"best": "eval/held_out/reward", "every_steps": 30},
                "data": {"eval": "a"},
                "learner": {"checkpoint_every_steps": 20},
            },
            "learner.checkpoint_every_steps = 20 not every evaluated step has one. Set the first to a multiple",
        ),
        (
            {"learner": {"offload": "optimizer"}},
            "learner.offload = optimizer needs optimizer state that ranks share. Set learner.ze",
        ),
        (
            {"learner": {"offload": "all", "zero_stage": 2}},
            "learner.offload = all needs learner.zero_stage = 3, and it is 2.",
        ),
        (
            {"critic": {"offload": True, "zero_stage": 0}},
            "offload = true needs zero_stage 2 or 3: at 0 every rank holds the whole optimizer.",
        ),
        (
            {"critic": {"offload": True}, "learner": {"recipe": "ppo", "zero_stage": 0}},
            "critic.offload = true needs ZeRO stage 2 or 3, and learner.zero_stage is 0. Set critic.zero_stage.",
        ),
        (
            {"policy": {"lora": {"rank": 4}, "warm_start": {"data": "rows.jsonl"}}},
            "policy.lora.rank and policy.warm_start.data are both set",
        ),
        (
            {"objective": "sft", "kl": {"coefficient": 0.1}},
            "kl.coefficient has no use with objective = sft, which generates and scores nothing. Remove it.",
        ),
        ({"objective": "sft", "rollout": {"group_size": 4}}, "rollout.group_size has no use with objective = sft"),
        ({"data": {"form": "demonstrations"}}, "data.form = demonstrations does not fit objective = policy_gradient"),
        ({"rollout": {"engine_args": {"enable_lora": True}}}, "Remove it: policy.lora needs nothing of the engine"),
        ({"rollout": {"engine_args": {"pipeline_parallel_size": 2}}}, "pipeline_parallel_size = 2 is not supported"),
        ({"rollout": {"engine_args": {"data_parallel_size": 2}}}, "data_parallel_size = 2 is not supported"),
        ({"rollout": {"engine_args": {"load_format": "auto"}}}, "load_format has no use: servers start with dummy"),
        (
            {"rollout": {"engine_args": {"logprobs_mode": "raw_logprobs"}}},
            "logprobs_mode = raw_logprobs makes the engine return logprobs",
        ),
    ],
)
def test_settings_that_cannot_go_together_are_refused(sections: dict[str, Any], text: str) -> None:
    ((_, problem),) = refusal(**sections)
    assert text in problem


@pytest.mark.parametrize("changed", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"logit_bias": {5: -1.0}}])
def test_sampling_that_makes_every_ratio_wrong_is_refused_for_training_alone(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"sampling": changed})
    assert f"sampling.{name} = {changed[name]} draws from another distribution than the policy's" in str(caught.value)
    assert Settings.model_validate({"sampling": changed | {"only_eval": True}}).sampling.reshaping == changed
    assert Settings.model_validate({"sampling": changed, "run": {"max_steps": 0}}).sampling.reshaping == changed


@pytest.mark.parametrize(
    "sections",
    [
        {"sampling": {"stop": ["</answer>"]}},
        {"rollout": {"engine_args": {"enable_lora": False, "logprobs_mode": "processed_logprobs"}}},
        {"critic": {"offload": True, "zero_stage": 2}, "learner": {"recipe": "ppo"}},
        {
            "filter": {"dynamic_sampling": True, "score": "em"},
            "rewards": {
                "combine": "shard",
                "endpoints": [
                    {"name": "em", "url": "http://127.0.0.1:9/r", "weight": 0.0},
                    {"name": "rm", "url": "http://127.0.0.1:9/s"},
                ],
            },
        },
    ],
)
def test_settings_that_go_together_are_accepted(sections: dict[str, Any]) -> None:
    Settings.model_validate(sections)
