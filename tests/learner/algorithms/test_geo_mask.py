"""The geometric mask against a slow loop over answers, in float64."""

import math

import pytest
import torch

from learner.algorithms.corrections.band import Band
from learner.algorithms.corrections.geo_mask import keep_near_answers
from tests.learner.algorithms.slow_tokens import COUNTS, parts, random_tokens


def slow(logprobs: list[float], old: list[float], band: Band) -> list[float]:
    if not logprobs:
        return []
    mean = math.exp(sum(new - before for new, before in zip(logprobs, old, strict=True)) / len(logprobs))
    return [float(band.low <= mean <= band.high)] * len(logprobs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("band", [Band(0.99, 1.01), Band(0.8, 1.25)])
def test_geo_mask_equals_the_slow_loop(seed: int, band: Band) -> None:
    logprobs, old, _ = random_tokens(seed, scale=0.2)
    weight = (logprobs - old).exp().detach()
    expected = [value for new, before in parts(logprobs, old) for value in slow(new, before, band)]
    assert keep_near_answers(weight, COUNTS, band).tolist() == expected


def test_many_small_steps_the_same_way_are_caught_where_the_same_steps_to_and_fro_are_not() -> None:
    there, fro = torch.full((100,), 1.02), torch.tensor([1.02, 1.0 / 1.02] * 50)
    found = keep_near_answers(torch.cat([there, fro]), (100, 100), Band(0.99, 1.01))
    assert found.tolist() == [0.0] * 100 + [1.0] * 100
