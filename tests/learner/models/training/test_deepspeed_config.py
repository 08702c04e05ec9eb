"""What of DeepSpeed's configuration is the operator's to set."""

from typing import Any

import pytest

from learner.models.training.deepspeed_config import deepspeed_config


def config(asked: dict[str, Any]) -> dict[str, Any]:
    return deepspeed_config(asked, zero_stage=2, dtype="float32", max_grad_norm=1.0, num_parameters=1000)


def test_a_section_is_merged_key_by_key() -> None:
    merged = config({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert merged["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu"},
    }


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ("none", {}),
        ("optimizer", {"offload_optimizer": {"device": "cpu"}}),
        ("all", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
def test_offload_follows_the_setting(offload: str, expected: dict[str, Any]) -> None:
    config = deepspeed_config(
        {}, zero_stage=3, dtype="float32", max_grad_norm=1.0, num_parameters=1000, offload=offload
    )["zero_optimization"]
    assert {key: value for key, value in config.items() if key.startswith("offload")} == expected
