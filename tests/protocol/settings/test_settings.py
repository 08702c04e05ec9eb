"""The settings themselves: their names, defaults that work, and the range of each."""

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from protocol.settings.section import Section
from protocol.settings.settings import Settings
from protocol.settings.tools import BUNDLED_TOOLS
from protocol.settings.zero_stage import zero_stage_of
from protocol.wire.trajectory import Count
from rollout.neighbours.tools.by_name import TOOLS
from tests.protocol.settings.refusal import refusal


def every_field(model: type[BaseModel], prefix: str = "") -> dict[str, str | None]:
    """Return the description of every field that is not a section, by dotted name."""
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
    "run": "name dir seed max_steps resume",
    "policy": "model dtype trust_remote_code",
    "data": "train eval prompt_key label_key",
    "rollout": "num_servers tensor_parallel_size group_size environment max_turns max_response_tokens "
    "max_observation_tokens max_context_tokens temperature engine_args",
    "retriever": "url topk",
    "rewards": "endpoints combine",
    "learner": "num_ranks zero_stage groups_per_step max_staleness stale_policy lr micro_batch_tokens recipe "
    "advantage loss correction checkpoint_every_steps deepspeed",
    "weights": "backend",
    "eval": "every_steps num_prompts samples",
    "report": "wandb_project",
}


def test_settings_have_the_names_that_scripts_rely_on() -> None:
    names = {f"{section}.{name}" for section, names in RELIED_ON.items() for name in names.split()}
    assert names - set(every_field(Settings)) == set()


def test_settings_know_the_tools_by_name() -> None:
    assert set(BUNDLED_TOOLS) == set(TOOLS)


def test_settings_do_not_change_after_loading() -> None:
    with pytest.raises(ValidationError, match="Instance is frozen"):
        Settings().learner.lr = 1.0  # type: ignore[misc]


def test_settings_leave_room_for_the_environments_own_part_among_64() -> None:
    endpoints = [{"name": f"e{i}", "url": "http://host/score"} for i in range(64)]
    assert len(Settings.model_validate({"rewards": {"endpoints": endpoints[:63]}}).rewards.endpoints) == 63
    assert refusal(rewards={"endpoints": endpoints})[0][0] == "rewards.endpoints"


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


def test_bfloat16_runs_at_a_zero_stage_whose_state_can_be_saved() -> None:
    assert [zero_stage_of(stage, "bfloat16") for stage in (0, 1, 2, 3)] == [2, 2, 2, 3]
    assert [zero_stage_of(stage, "float32") for stage in (0, 1, 2, 3)] == [0, 1, 2, 3]
