"""What of LoRA adapters is refused by name, with what to do instead."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.settings import Settings


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"policy": {"lora": {"rank": 4, "push": "adapters"}}}, "merged weights that checkpoints hold"),
        ({"rollout": {"engine_args": {"enable_lora": True}}}, "Remove it: policy.lora needs nothing of the engine"),
        ({"rollout": {"engine_args": {"load_format": "auto"}}}, "load_format has no use: servers start with dummy"),
    ],
)
def test_settings_refuse_adapters_beside_the_engines_weights(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Settings.model_validate(given)


def test_engine_without_adapters_may_be_told_so() -> None:
    assert Settings.model_validate({"rollout": {"engine_args": {"enable_lora": False}}}).rollout.engine_args
