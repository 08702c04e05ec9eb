"""Behaviour corrections of given importance weights, and how they meet a loss that has the ratio in it."""

import pytest
import torch

from learner.algorithms.by_name import CORRECTIONS
from learner.algorithms.corrections.band import Band
from learner.algorithms.corrections.token_weights import token_weights

WEIGHTS = torch.tensor([0.1, 0.5, 1.0, 2.0, 2.1, 50.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("tis", [0.1, 0.5, 1.0, 2.0, 2.0, 2.0]),
        ("icepop", [0.0, 0.5, 1.0, 2.0, 0.0, 0.0]),
    ],
)
def test_loss_without_a_ratio_is_multiplied_with_the_corrected_weight(name: str, expected: list[float]) -> None:
    found = token_weights(CORRECTIONS[name], WEIGHTS, (2, 4), Band(0.5, 2.0), is_in_loss=False)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("tis", [1.0, 1.0, 1.0, 1.0, 2.0 / 2.1, 2.0 / 50.0]),
        ("icepop", [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_loss_with_the_ratio_loses_what_the_correction_cuts_away(name: str, expected: list[float]) -> None:
    found = token_weights(CORRECTIONS[name], WEIGHTS, (2, 4), Band(0.5, 2.0), is_in_loss=True)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "expected"), [("tis", [0.1, 0.5, 1, 1.5, 1.5, 1.5]), ("icepop", [0, 0, 1, 0, 0, 0])])
def test_band_is_a_setting(name: str, expected: list[float]) -> None:
    found = token_weights(CORRECTIONS[name], WEIGHTS, (2, 4), Band(0.75, 1.5), is_in_loss=False)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
