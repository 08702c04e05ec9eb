"""The log ratio, behaviour corrections of given weights, and how they meet a loss that has the ratio in it.

The geometric mask is compared with a slow loop over answers, in float64.
"""

import math

import pytest
import torch

from learner.algorithms.by_name import CORRECTIONS
from learner.algorithms.importance import Band, keep_near_answers, log_ratio, token_weights
from tests.learner.algorithms.slow_tokens import COUNTS, parts, random_tokens

WEIGHTS = torch.tensor([0.1, 0.5, 1.0, 2.0, 2.1, 50.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "is_in_loss", "band", "expected"),
    [
        # A loss without the ratio is multiplied with the corrected weight.
        ("none", False, Band(0.5, 2.0), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("tis", False, Band(0.5, 2.0), [0.1, 0.5, 1.0, 2.0, 2.0, 2.0]),
        ("icepop", False, Band(0.5, 2.0), [0.0, 0.5, 1.0, 2.0, 0.0, 0.0]),
        ("tis", False, Band(0.75, 1.5), [0.1, 0.5, 1.0, 1.5, 1.5, 1.5]),
        ("icepop", False, Band(0.75, 1.5), [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        # A loss with the ratio loses what the correction cuts away.
        ("none", True, Band(0.5, 2.0), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("tis", True, Band(0.5, 2.0), [1.0, 1.0, 1.0, 1.0, 2.0 / 2.1, 2.0 / 50.0]),
        ("icepop", True, Band(0.5, 2.0), [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_correction_of_given_weights(name: str, is_in_loss: bool, band: Band, expected: list[float]) -> None:
    found = token_weights(CORRECTIONS[name], WEIGHTS, (2, 4), band, is_in_loss=is_in_loss)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_log_ratio_stays_within_20() -> None:
    logprobs, old = torch.tensor([0.0, -500.0, -1.0]), torch.tensor([-500.0, 0.0, -1.5])
    assert log_ratio(logprobs, old).tolist() == [20.0, -20.0, 0.5]


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
