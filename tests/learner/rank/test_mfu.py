"""The share of the devices' peak that a step used, and where it is not reported."""

from types import SimpleNamespace
from typing import Any

import pytest

from learner.rank.mfu import mfu, peak_flops
from protocol.settings.settings import Settings


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [("NVIDIA L4", "bfloat16", 121e12), ("NVIDIA L40S", "bfloat16", 362e12), ("NVIDIA H100", "float32", None)],
)
def test_peak_is_that_of_the_device_and_type(device: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(device, dtype) == peak


def test_tokens_outside_the_loss_and_other_ranks_count_as_they_should() -> None:
    batch: Any = SimpleNamespace(facts=[SimpleNamespace(num_tokens=number) for number in (10, 20, 70)], planned=[0, 1])
    assert mfu(1000, batch, 2.0, Settings.model_validate({"learner": {"num_ranks": 2}}), 1e6) == 6.0 * 1000 * 30 / (
        2.0 * 1e6 * 2
    )
