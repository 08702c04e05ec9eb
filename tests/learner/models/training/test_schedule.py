"""The learning rate's course."""

import pytest

from learner.models.training.optimizer import learning_rate_factor


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
