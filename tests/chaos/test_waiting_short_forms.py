"""Short forms that mostly wait, in parallel: servers that do not answer, and pushes that meet faults."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

_NAMES = ("hangs", "push_faults")


@pytest.fixture(scope="module")
def commands() -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """Yield the commands, all of which have begun."""
    begun = {
        name: subprocess.Popen(
            [sys.executable, "-m", f"tests.chaos.{name}", "--seed", "1", "--short"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in _NAMES
    }
    yield begun
    for command in begun.values():
        command.kill()
        command.communicate()


@pytest.mark.timeout(240)
def test_hangs_holds_in_its_short_form(commands: dict[str, "subprocess.Popen[str]"]) -> None:
    output, errors = commands["hangs"].communicate(timeout=220)
    figures = r"hangs ways=\d\d hung=0 wrong_names=0 longest_over_limit_s=[\d.e-]+ holds=yes"
    assert re.fullmatch(figures, output.splitlines()[-1]), output[-6000:] + errors[-3000:]
    assert commands["hangs"].returncode == 0


@pytest.mark.timeout(300)
def test_push_faults_holds_in_its_short_form(commands: dict[str, "subprocess.Popen[str]"]) -> None:
    output, errors = commands["push_faults"].communicate(timeout=280)
    # How soon the others write is the machine's matter, which may be busy.
    figures = (
        r"push_faults pushes=\d+ faults=8 cut=\w+ unexpected_failures=0 wrong_tokens=0 tokens=[1-9]\d* "
        r"longest_push_s=[\d.]+ others_after_s=[\d.]+ back_after_s=[\d.]+ holds=(yes|no)"
    )
    assert re.fullmatch(figures, output.splitlines()[-1]), output[-6000:] + errors[-3000:]
