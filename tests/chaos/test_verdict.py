"""The options of a chaos command."""

import sys

import pytest

from tests.chaos.rig.verdict import options


def test_too_few_to_conclude_from_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["push_faults", "--pushes", "4"])
    with pytest.raises(SystemExit) as ended:
        options("", {"pushes": 10}, pushes=300)

    assert ended.value.code == 2
    assert "--pushes 4: give at least 10" in capsys.readouterr().err


def test_short_form_has_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["push_faults", "--pushes", "4", "--short"])

    assert options("", {"pushes": 10}, pushes=300).short
