"""The settings themselves: defaults that work, ranges, and combinations that are refused."""

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from protocol.settings.section import Section
from protocol.settings.settings import Settings
from protocol.wire.trajectory import Count

_NAME_RULE = "expected at most 180 of A-Z a-z 0-9 . _ -, of which the first is a letter or digit; a folder is run.dir's"


def refusal(**sections: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (dotted name, text) of every problem of these sections."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(sections)
    return [(".".join(str(part) for part in e["loc"]), e["msg"]) for e in caught.value.errors()]


def every_field(model: type[BaseModel], prefix: str = "") -> dict[str, str | None]:
    """Return the description of every field that is no section, by dotted name."""
    found: dict[str, str | None] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= every_field(kind, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field.description
    return found


def test_settings_have_defaults_for_everything() -> None:
    settings = Settings()
    assert settings.learner.groups_per_step == 32
    assert settings.learner.max_staleness == 1
    assert settings.learner.stale_policy == "wait"
    assert settings.rollout.group_size == 8
    assert settings.rewards.endpoints == []
    assert settings.retriever.url is None
    assert settings.weights.backend == "auto"
    assert settings.run.resume == "auto"


def test_every_setting_has_a_description() -> None:
    assert [name for name, text in every_field(Settings).items() if not text] == []


RELIED_ON = {
    "run.name",
    "run.dir",
    "run.seed",
    "run.max_steps",
    "run.resume",
    "policy.model",
    "policy.dtype",
    "policy.trust_remote_code",
    "data.train",
    "data.eval",
    "data.prompt_key",
    "data.label_key",
    "rollout.num_servers",
    "rollout.tensor_parallel_size",
    "rollout.group_size",
    "rollout.environment",
    "rollout.max_turns",
    "rollout.max_response_tokens",
    "rollout.max_observation_tokens",
    "rollout.max_context_tokens",
    "rollout.temperature",
    "rollout.engine_args",
    "retriever.url",
    "retriever.topk",
    "rewards.endpoints",
    "rewards.combine",
    "learner.num_ranks",
    "learner.zero_stage",
    "learner.groups_per_step",
    "learner.max_staleness",
    "learner.stale_policy",
    "learner.lr",
    "learner.micro_batch_tokens",
    "learner.recipe",
    "learner.advantage",
    "learner.loss",
    "learner.correction",
    "learner.checkpoint_every_steps",
    "learner.deepspeed",
    "weights.backend",
    "eval.every_steps",
    "eval.num_prompts",
    "eval.samples",
    "report.wandb_project",
}


def test_settings_have_the_names_that_scripts_rely_on() -> None:
    assert RELIED_ON - set(every_field(Settings)) == set()


def test_settings_do_not_change_after_loading() -> None:
    with pytest.raises(ValidationError, match="Instance is frozen"):
        Settings().learner.lr = 1.0  # type: ignore[misc]


def test_settings_refuse_an_unknown_key() -> None:
    assert refusal(learner={"colour": "red"}) == [("learner.colour", "Extra inputs are not permitted")]


@pytest.mark.parametrize(
    ("section", "field", "value", "text"),
    [
        ("learner", "groups_per_step", 0, "Input should be greater than 0"),
        ("learner", "max_staleness", -1, "Input should be greater than or equal to 0"),
        ("learner", "zero_stage", 4, "Input should be 0, 1, 2 or 3"),
        ("learner", "lr", float("inf"), "Input should be a finite number"),
        ("learner", "min_lr_ratio", 1.5, "Input should be less than or equal to 1"),
        ("learner", "keep_checkpoints", 1, "Input should be greater than or equal to 2"),
        ("learner", "stale_policy", "skip", "Input should be 'wait' or 'drop'"),
        ("rollout", "temperature", 0, "Input should be greater than 0"),
        ("rollout", "turn_timeout_s", float("inf"), "Input should be a finite number"),
        (
            "run",
            "name",
            "../up",
            f"Value error, {_NAME_RULE}",
        ),
        ("retriever", "url", "ftp://host", "URL scheme should be 'http' or 'https'"),
        (
            "retriever",
            "url",
            "http://me:secret@host/retrieve",
            "Value error, holds a user or password, which would be in settings.yaml and logs. Use headers_env.",
        ),
        ("run", "max_steps", "many", "Input should be a valid integer, unable to parse string as an integer"),
    ],
)
def test_settings_refuse_a_value_out_of_range(section: str, field: str, value: object, text: str) -> None:
    assert refusal(**{section: {field: value}}) == [(f"{section}.{field}", text)]


def test_settings_refuse_an_endpoint_with_the_name_of_the_environments_own_part() -> None:
    endpoint = {"name": "environment", "url": "http://host/score"}
    assert refusal(rewards={"endpoints": [endpoint]}) == [
        (
            "rewards.endpoints.0.name",
            "Value error, is the part that environments' own rewards have. Give the endpoint another name.",
        )
    ]


def test_settings_leave_room_for_the_environments_own_part_among_64() -> None:
    endpoints = [{"name": f"e{i}", "url": "http://host/score"} for i in range(64)]
    assert len(Settings.model_validate({"rewards": {"endpoints": endpoints[:63]}}).rewards.endpoints) == 63
    assert refusal(rewards={"endpoints": endpoints})[0][0] == "rewards.endpoints"


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


def whole_numbers(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of the settings that are whole numbers."""
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += whole_numbers(field.annotation, f"{prefix}{name}.")
        elif field.annotation is int:
            found.append(f"{prefix}{name}")
    return found


@pytest.mark.parametrize("name", whole_numbers(Settings))
def test_whole_number_is_no_larger_than_a_message_carries(name: str) -> None:
    (largest,) = (meta.le for meta in get_args(Count)[1:])
    *path, field = name.split(".")
    sections: dict[str, Any] = {field: largest + 1}
    for section in reversed(path):
        sections = {section: sections}
    assert any(where == name and "less than or equal to" in text for where, text in refusal(**sections))


def wait_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted names of the settings that are seconds."""
    return [name for name in every_field(model, prefix) if name.endswith("_s")]


@pytest.mark.parametrize("name", wait_names(Settings))
def test_wait_is_no_longer_than_timers_take(name: str) -> None:
    section, field = name.split(".")
    assert refusal(**{section: {field: 1e300}}) == [(name, "Input should be less than or equal to 1000000")]


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
        ({"sequence_parallel": 2}, "one trajectory is computed by one rank: splitting it over ranks (DeepSpeed Ulysse"),
    ],
)
def test_settings_refuse_what_a_rank_cannot_do_with_its_memory(learner: dict[str, Any], text: str) -> None:
    ((_, said),) = refusal(learner=learner)
    assert text in said


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            {"lora": {"quantize": "4bit"}},
            "QLoRA keeps the base in 4 bits with bitsandbytes, which is not among this pro",
        ),
        (
            {"lora": {"rank": 4}, "warm_start": {"data": "rows.jsonl"}},
            "policy.lora.rank and policy.warm_start.data are",
        ),
    ],
)
def test_settings_refuse_adapters_that_could_not_be_resumed_or_pushed(policy: dict[str, Any], text: str) -> None:
    ((_, said),) = refusal(policy=policy)
    assert text in said
