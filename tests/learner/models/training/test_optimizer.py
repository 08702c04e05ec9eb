"""AdamW that clips and refuses gradients that are not finite, the check of weights, and the learning rate."""

import pytest
import torch

from learner.models.training.optimizer import GuardedAdamW, first_non_finite, learning_rate_factor


def parameters(*gradients: list[float]) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return made


def test_gradient_is_clipped_by_the_norm_of_all_parameters_together() -> None:
    made = parameters([3.0, 0.0], [4.0])
    optimizer = GuardedAdamW(made, max_grad_norm=1.0, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.step()
    assert not optimizer.overflow
    assert optimizer._global_grad_norm == pytest.approx(5.0)
    moments = [optimizer.state[parameter]["exp_avg"].tolist() for parameter in made]
    assert moments[0] == pytest.approx([0.06, 0.0], rel=1e-4)
    assert moments[1] == pytest.approx([0.08], rel=1e-4)
    assert made[0].tolist() == pytest.approx([0.9, 1.0], rel=1e-4)


def test_small_gradient_is_left_as_it_is() -> None:
    made = parameters([0.3, 0.4])
    optimizer = GuardedAdamW(made, max_grad_norm=1.0, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer.step()
    assert optimizer.state[made[0]]["exp_avg"].tolist() == pytest.approx([0.03, 0.04], rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_changes_nothing_and_the_next_one_is_applied(bad: float) -> None:
    made = parameters([1.0, bad], [1.0])
    optimizer = GuardedAdamW(made, max_grad_norm=1.0, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.step()
    assert optimizer.overflow
    assert [parameter.tolist() for parameter in made] == [[1.0, 1.0], [1.0]]
    assert not optimizer.state
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not optimizer.overflow
    assert all((parameter < 1.0).all() for parameter in made)


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


def course(schedule: str, steps: int = 6, **changes: float) -> list[float]:
    numbers = {"warmup_steps": 2, "total_steps": 4, "min_ratio": 0.0, **changes}
    return [learning_rate_factor(done, schedule=schedule, **numbers) for done in range(steps)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.5, 0.0, 0.0, 0.0]),
        ("cosine", [0.5, 1.0, 0.5, 0.0, 0.0, 0.0]),
    ],
)
def test_learning_rate_warms_up_then_decays(schedule: str, expected: list[float]) -> None:
    assert course(schedule) == pytest.approx(expected)


def test_learning_rate_ends_at_the_smallest_share() -> None:
    assert course("linear", min_ratio=0.1, total_steps=5)[1:] == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.1])


def test_learning_rate_starts_at_the_peak_without_warm_up() -> None:
    assert course("linear", warmup_steps=0, total_steps=3, steps=3) == pytest.approx([1.0, 0.5, 0.0])


def test_learning_rate_stays_finite_when_the_warm_up_is_longer_than_the_run() -> None:
    assert course("cosine", warmup_steps=5, total_steps=3, steps=7) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 0.0, 0.0]
    )
