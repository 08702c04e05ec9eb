"""What is not finite is found, and named."""

import pytest
import torch

from learner.models.training.optimizer import first_non_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 4999, 9999])
def test_one_bad_number_among_ten_thousand_is_found(bad: float, dtype: torch.dtype, place: int) -> None:
    tensor = torch.randn(100, 100).to(dtype)
    tensor.view(-1)[place] = bad
    assert first_non_finite([("good", torch.ones(3)), ("bad", tensor)]) == "bad"


def test_largest_numbers_whole_numbers_and_nothing_are_finite() -> None:
    tensors = {
        "largest": torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]),
        "whole": torch.tensor([1, 2]),
        "nothing": torch.empty(0),
    }
    assert first_non_finite(tensors.items()) is None
