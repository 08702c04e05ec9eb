"""Combinations of settings: those that are accepted, refused for training alone, or reported at the start.

wrong_settings.txt has the refused ones.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.effects import describe_surprises
from protocol.settings.settings import Settings


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
        {"learner": {"recipe": "ppo"}, "rollout": {"group_size": 1}},
        {"objective": "sft", "rollout": {"max_context_tokens": 128}},
        {"learner": {"advantage": "reinforce_pp"}, "rollout": {"group_size": 1}},
        {"learner": {"advantage": "my.py:best"}, "rollout": {"group_size": 1}},
        {"learner": {"advantage": "package.module:best", "loss": "./a/b.py:loss"}},
        {"learner": {"recipe": "dr_grpo"}, "loss": {"constant": 100}},
        {"learner": {"recipe": "ppo"}, "kl": {"target": 0.1}},
        {"kl": {"coefficient": 0.01, "target": 0.1, "horizon": 52}},
        {"rewards": {"overlong_buffer_tokens": 500, "overlong_max_tokens": 501}},
        {"learner": {"recipe": "ppo", "gamma": 0.9, "gae_lambda": 0.5}, "critic": {"warmup_steps": 5}},
        {"learner": {"advantage": "mine.py:advantage", "gae_lambda": 0.5}, "critic": {"lr": 1e-5}},
        {"learner": {"loss": "mine.py:loss", "dual_clip": 5.0}},
        {"learner": {"correction": "icepop", "correction_low": 0.5, "correction_high": 3.0}},
        {"learner": {"recipe": "ppo"}, "kl": {"coefficient": 0.0}},  # place and form are the recipe's
        {"learner": {"loss": "gspo"}, "policy": {"old_logprobs": "behaviour", "dtype": "float32"}},
        {"learner": {"recipe": "cispo", "correction": "tis"}, "policy": {"old_logprobs": "recompute"}},
        {"filter": {"score": "em"}, "data": {"curriculum": {"easy": 1.0, "every": 8}}},
        {"rewards": {"normalize": True, "clip": 5.0}},
        {
            "rewards": {"overlong_buffer_tokens": 100, "overlong_max_tokens": 2000},
            "rollout": {"environment": "search"},
        },
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


@pytest.mark.parametrize(
    ("sections", "surprise"),
    [
        ({"policy": {"old_logprobs": "recompute"}, "learner": {"clip_high": 0.28}}, "clip_high = 0.28 clips nothing"),
        ({"learner": {"loss": "gspo", "clip_high": 0.2, "num_epochs": 2}}, "clip_high = 0.2 clips almost nothing"),
        (
            {"run": {"max_steps": 4}, "learner": {"recipe": "ppo"}, "critic": {"warmup_steps": 4}},
            "critic.warmup_steps = 4 and run.max_steps = 4: the critic alone is trained",
        ),
        (
            {"run": {"max_steps": 100}, "learner": {"lr_warmup_steps": 400}},
            "learner.lr_warmup_steps = 400 is longer than the policy's 100 steps: its learning rate ends at 0.25",
        ),
        (
            {"rollout": {"max_turns": 8}},
            "rollout.max_turns = 8 has no effect: rollout.environment = single_turn has one turn",
        ),
        (
            {"rollout": {"max_conversation_s": 60}},
            "rollout.max_conversation_s = 60.0 has no effect: rollout.environment = single_turn has one turn",
        ),
        *(
            ({"rollout": {"environment": environment} | changed}, f"rollout.{said} does not apply to agents: ")
            for environment in ("agents", "agent:a.py:solve")
            for changed, said in (
                ({"max_turns": 8}, "max_turns = 8"),
                ({"max_observation_tokens": 9}, "max_observation_tokens = 9"),
                ({"max_conversation_s": 60}, "max_conversation_s = 60.0"),
                ({"truncate_left": True}, "truncate_left = true"),
            )
        ),
        ({"data": {"eval": "a"}}, "data.eval is never evaluated: eval.every_steps is 0. Set it"),
        (
            {"objective": "sft", "learner": {"num_epochs": 3}},
            "learner.num_epochs = 3 trains each step's rows 3 times before the next step's. Passes over data.train are",
        ),
        ({"learner": {"lr": 3}}, "learner.lr = 3 ruins a model within a few steps"),
        ({"rollout": {"engine_args": {"quantization": "fp8"}}}, "quantization = fp8: servers sample from rounded"),
    ],
)
def test_surprising_setting_is_reported_at_the_start(sections: dict[str, Any], surprise: str) -> None:
    (text,) = describe_surprises(Settings.model_validate(sections))
    assert surprise in text


def test_usual_settings_have_no_surprise() -> None:
    assert describe_surprises(Settings()) == []
