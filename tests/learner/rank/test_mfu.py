"""The share of the devices' peak that a step used, and where it is not reported."""

import pytest

from learner.rank.mfu import mfu, peak_flops


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("NVIDIA RTX A4000", "bfloat16", None),  # no A40
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
    ],
)
def test_peak_is_that_of_the_device_and_type(device: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(device, dtype) == peak


def test_mfu_is_6_flops_a_weight_and_computed_token_over_the_peak_of_all_ranks() -> None:
    # 1,000 weights, 90 tokens: 540,000 FLOPs. 2 s on 2 ranks of 1 MFLOP/s: 4,000,000.
    assert mfu(1000, 90, 2.0, 2e6) == pytest.approx(0.135)
