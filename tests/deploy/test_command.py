"""`sluice`: one name for every command."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.command import VERBS, run_verb

SLUICE = Path(sys.executable).with_name("sluice")


def test_help_fits_on_a_small_screen_with_one_line_for_each_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_explains_itself_by_the_name_that_was_typed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = run_verb([verb, "--help"])
    except SystemExit as ended:  # argparse
        status = int(ended.code or 0)
    shown = capsys.readouterr().out
    assert (status, f"usage: sluice {'run' if verb == 'plan' else verb}" in shown) == (0, True)
    assert "python -m" not in shown


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("statsu", "Did you mean sluice status?"),
        ("frobnicate", f"Use one of {', '.join(VERBS)}."),
    ],
)
def test_unknown_verb_is_answered_with_the_likeliest(given: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb([given]) == 2
    assert capsys.readouterr().err == f"sluice: {given} is not known. {hint}\n"


def test_script_of_the_package_runs_in_a_folder_that_has_rooms_of_the_users(tmp_path: Path) -> None:
    for room in ("protocol", "deploy", "rewards"):
        (tmp_path / f"{room}.py").write_text("raise SystemExit('the wrong one')\n")
    done = subprocess.run(
        [SLUICE, "serve-reward", "--scorer", "exact"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rewards: --scorer exact")
