"""Model FLOPs utilisation of a step: the FLOPs that training needs at least, over what the devices could have done."""

import re
from collections.abc import Callable
from math import prod

import torch

from learner.models.policy import PolicyEngine
from protocol.settings.settings import Settings

# Words of a device's name -> its dense bfloat16 FLOPs per second, from the maker's data sheet. The first match counts.
_PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "G?H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "L4": 121e12,
    "RTX 4090$": 165e12,
}

Meter = Callable[[float], dict[str, float]]
"""(seconds of a step's training) -> perf/mfu; nothing where it cannot be known."""


def no_mfu(train_s: float) -> dict[str, float]:
    """Return nothing: the device's peak is not known."""
    return {}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the device's peak in FLOPs per second; None when it is not known for this device or type."""
    if dtype != "bfloat16":
        return None
    return next((peak for words, peak in _PEAKS.items() if re.search(rf"\b{words}(?!\w)", device_name)), None)


def make_meter(policy: PolicyEngine, settings: Settings) -> Meter:
    """Return the meter of a dense policy whose weights are all trained, on devices with a known peak."""
    name = torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else ""
    peak = peak_flops(name, settings.policy.dtype)
    if peak is None or settings.policy.lora.rank or policy.has_experts:
        return no_mfu
    num_parameters = sum(prod(policy.shape_of(weight)) for _, weight in policy.weights())
    peak_of_ranks = peak * settings.learner.num_ranks
    return lambda train_s: {"perf/mfu": mfu(num_parameters, policy.take_computed(), train_s, peak_of_ranks)}


def mfu(num_parameters: int, num_tokens: float, train_s: float, peak: float) -> float:
    """Return the share of the ranks' peak that a step used. Source: arXiv:2001.08361, 6 FLOPs a parameter and token.

    num_tokens: computed by all ranks in all updates, a shared prompt once. peak: of all ranks.
    """
    return 6.0 * num_parameters * num_tokens / (train_s * peak)
