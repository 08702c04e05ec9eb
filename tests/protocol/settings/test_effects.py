"""A changed setting has the effect of its name, or is refused or reported."""

from typing import Any

import pytest

from protocol.settings.effects import describe_surprises
from protocol.settings.settings import Settings
from tests.protocol.settings.refusal import refusal

_NO_KL = "has no effect: kl.coefficient is 0"
_NO_CRITIC = "has no effect: learner.advantage has no critic"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"reference": {"model": "/models/base"}}, f"reference.model = /models/base {_NO_KL}"),
        ({"reference": {"refresh_every_steps": 50}}, f"reference.refresh_every_steps = 50 {_NO_KL}"),
        ({"reference": {"offload": True}}, f"reference.offload = true {_NO_KL}"),
        ({"kl": {"place": "reward"}}, f"kl.place = reward {_NO_KL}"),
        ({"kl": {"coefficient": 0.1, "horizon": 500.0}}, "kl.horizon = 500.0 has no effect: kl.target is null"),
        ({"critic": {"model": "/models/rm"}}, f"critic.model = /models/rm {_NO_CRITIC}"),
        ({"critic": {"warmup_steps": 20}}, f"critic.warmup_steps = 20 {_NO_CRITIC}"),
        ({"rewards": {"truncated_penalty": 2.0}}, "has no effect: rewards.truncated is not penalise"),
        ({"rewards": {"overlong_penalty": 2.0}}, "has no effect: rewards.overlong_buffer_tokens is 0"),
        ({"rewards": {"overlong_max_tokens": 500}}, "has no effect: rewards.overlong_buffer_tokens is 0"),
        ({"rewards": {"normalize": True}}, "rewards.normalize = true has no effect: learner.advantage = grpo divides"),
        ({"filter": {"low": 0.1}}, "filter.low = 0.1 has no effect: filter.dynamic_sampling is false"),
        ({"filter": {"at_limit": "keep"}}, "filter.at_limit = keep has no effect"),
        ({"filter": {"score": "em"}}, "filter.score = em has no effect: nothing is filtered"),
        ({"data": {"curriculum": {"every": 8}}}, "data.curriculum.every = 8 has no effect"),
        ({"learner": {"lr": 0.0, "lr_warmup_steps": 10}}, "learner.lr_warmup_steps = 10 has no effect"),
        (
            {"learner": {"lr_schedule": "constant", "min_lr_ratio": 0.5}},
            "learner.min_lr_ratio = 0.5 has no effect: learner.lr_schedule = constant keeps the peak",
        ),
        ({"policy": {"lora": {"alpha": 16.0}}}, "policy.lora.alpha = 16.0 has no effect: policy.lora.rank is 0"),
        ({"policy": {"lora": {"targets": ["q_proj"]}}}, "has no effect: policy.lora.rank is 0"),
        ({"sampling": {"only_eval": True}}, "sampling.only_eval = true has no effect"),
        (
            {"learner": {"loss": "cispo", "dual_clip": 5.0}},
            "learner.dual_clip = 5.0 has no effect: learner.loss = cispo does not read it. Remove it, or set "
            "learner.loss to one of ppo.",
        ),
        ({"learner": {"recipe": "rloo", "clip_high": 0.3}}, "learner.clip_high = 0.3 has no effect: learner.loss"),
        ({"learner": {"gae_lambda": 0.9}}, "has no effect: learner.advantage = grpo does not read it."),
        ({"learner": {"correction_low": 0.5}}, "set learner.correction to one of icepop, geo_mask."),
        ({"learner": {"correction": "none", "correction_high": 3.0}}, "learner.correction = none does not read it."),
    ],
)
def test_setting_without_effect_is_refused(sections: dict[str, Any], problem: str) -> None:
    ((_, text),) = refusal(**sections)
    assert problem in text


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"learner": {"loss": "gspo"}, "policy": {"old_logprobs": "behaviour"}}, "rounding would decide which answers"),
        ({"learner": {"recipe": "cispo"}, "policy": {"old_logprobs": "recompute"}}, "without a correction"),
        (
            {"rewards": {"overlong_buffer_tokens": 100}, "rollout": {"environment": "search"}},
            "counts the tokens of a whole conversation",
        ),
        ({"rollout": {"engine_args": {"logits_processors": ["x:Y"]}}}, "logits_processors changes what the engine"),
        ({"rollout": {"engine_args": {"generation_config": "auto"}}}, "generation_config changes what the engine"),
    ],
)
def test_setting_with_another_effect_than_its_name_is_refused(sections: dict[str, Any], problem: str) -> None:
    ((_, text),) = refusal(**sections)
    assert problem in text


@pytest.mark.parametrize(
    "sections",
    [
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
    ],
)
def test_setting_with_effect_is_accepted(sections: dict[str, Any]) -> None:
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
        ({"rollout": {"engine_args": {"quantization": "fp8"}}}, "quantization = fp8: servers sample from rounded"),
    ],
)
def test_surprising_setting_is_reported_at_the_start(sections: dict[str, Any], surprise: str) -> None:
    (text,) = describe_surprises(Settings.model_validate(sections))
    assert surprise in text


def test_usual_settings_have_no_surprise() -> None:
    assert describe_surprises(Settings()) == []
