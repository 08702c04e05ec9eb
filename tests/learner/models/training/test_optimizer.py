"""AdamW that clips by global norm and refuses a gradient that is not finite."""

import pytest
import torch

from learner.models.training.optimizer import GuardedAdamW


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
def test_gradient_that_is_not_finite_changes_nothing_and_the_next_one_is_taken(bad: float) -> None:
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
