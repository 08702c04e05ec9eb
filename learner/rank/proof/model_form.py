"""The settings that the models of a checkpoint have their form from, as they were when it was saved.

A resume may change them, and a start proves what a death left unproven: by the settings of then, not of now.
"""

from collections.abc import Mapping
from typing import Any

from protocol.settings.policy import LoraSettings
from protocol.settings.settings import Settings


def made_with(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return section -> setting -> value, as JSON has it."""
    return {
        "policy": settings.policy.model_dump(mode="json", include={"dtype", "lora"}),
        "critic": settings.critic.model_dump(mode="json", include={"model"}),
    }


def as_saved(settings: Settings, told: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Return the settings with those that were told in place of theirs; as they are, where nothing was told."""
    if not told:
        return settings
    form = {"dtype": told["policy"]["dtype"], "lora": LoraSettings.model_validate(told["policy"]["lora"])}
    policy = settings.policy.model_copy(update=form)
    return settings.model_copy(update={"policy": policy, "critic": settings.critic.model_copy(update=told["critic"])})
