"""What a run needs follows from what it does."""

import pytest

from learner.plan.needs import Needs, needs_of
from protocol.settings.settings import Settings

_WARM = {"warm_start": {"data": "rows.jsonl"}}
_EVALUATED = {"data": {"eval": "e.jsonl"}, "eval": {"every_steps": 1}}


@pytest.mark.parametrize(
    ("sections", "needs"),
    [
        pytest.param({"run": {"max_steps": 0}, "policy": _WARM}, Needs(False, False), id="a warm start alone"),
        pytest.param(
            {"run": {"max_steps": 0}, "policy": _WARM, **_EVALUATED}, Needs(False, True), id="a warm start, evaluated"
        ),
        pytest.param({"run": {"max_steps": 0}, **_EVALUATED}, Needs(False, True), id="an evaluation alone"),
        pytest.param({"run": {"max_steps": 1}, "policy": _WARM}, Needs(True, True), id="a warm start and a step"),
        pytest.param({"run": {"max_steps": 1}, "objective": "sft"}, Needs(True, False), id="steps on rows"),
        pytest.param({"run": {"max_steps": 1}}, Needs(True, True), id="steps"),
        pytest.param({"run": {"max_steps": 0}}, Needs(True, True), id="no steps"),
    ],
)
def test_needs_of_a_run_are_those_of_all_that_it_does(sections: dict[str, object], needs: Needs) -> None:
    assert needs_of(Settings.model_validate(sections)) == needs
