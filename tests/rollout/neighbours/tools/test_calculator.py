"""The calculator's values, and what it refuses at once."""

import time

import pytest

from rollout.environments.base import ToolRefusal
from rollout.neighbours.tools.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(3 + 4) * -12", "-84"),
        ("2 ** 10 / 4", "256"),
        ("2^10", "1024"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333"),
        ("17 // 5 + 17 % 5", "5"),
        ("123456789 * 987654321", "121932631112635269"),
        ("0.1 + 0.2", "0.3"),
        (" 1e3 ", "1000"),
    ],
)
def test_expression_has_its_value(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "the value is too large"),
        ("10.0 ** 400", "the value is too large"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** 0.5", "not an arithmetic expression"),
        ("__import__('os').system('ls')", "not an arithmetic expression"),
        ("'a' * 1000", "not an arithmetic expression"),
        ("2 +", "not an arithmetic expression"),
        ("True + 1", "not an arithmetic expression"),
        ("(" * 900, "not an arithmetic expression"),
        ("1 +" * 400 + "1", "the expression has 1201 characters"),
    ],
)
def test_what_is_no_small_number_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ToolRefusal, match=problem.replace("*", r"\*")):
        calculate(expression)


def test_no_expression_takes_long() -> None:
    worst = "*".join(["9" * 290] * 3)
    started = time.process_time()
    with pytest.raises(ToolRefusal):
        calculate(worst)
    assert time.process_time() - started < 1.0
