"""Short forms that mostly wait, in parallel: cut links, and servers that do not answer."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_SKIPPED = 77  # this machine cannot make network namespaces

_FIGURES = (
    r"partition cut_s=[\d.]+ steps_while_cut=\d+ standstill_s=[\d.]+ longest_push_s=[\d.]+ synced_after_s=[\d.]+ "
    r"used_after_s=[\d.]+ kept_results=\d+ taken_back=\d+ skipped=0 audit=passed holds=yes"
)


Command = subprocess.Popen[str]


@contextmanager
def _begun(*names: str) -> Iterator[list[Command]]:
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.chaos.{name}", "--seed", "1", "--short"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    try:
        yield commands
    finally:
        for command in commands:
            command.kill()
            command.communicate()


@pytest.fixture(scope="module")
def commands() -> Iterator[dict[str, Command]]:
    with _begun("partition", "hangs") as (partition, hangs):
        yield {"partition": partition, "hangs": hangs}


@pytest.fixture(scope="module")
def push_faults() -> Iterator[Command]:
    """Begins when `partition` has ended, whose steps would wait for processors behind it."""
    with _begun("push_faults") as (command,):
        yield command


@pytest.mark.timeout(300)
def test_partition_holds_in_its_short_form(commands: dict[str, Command]) -> None:
    output, errors = commands["partition"].communicate(timeout=280)
    if commands["partition"].returncode == _SKIPPED:
        pytest.skip(output.strip())
    assert re.fullmatch(_FIGURES, output.splitlines()[-1]), output[-3000:] + errors[-3000:]
    assert commands["partition"].returncode == 0


@pytest.mark.timeout(240)
def test_hangs_holds_in_its_short_form(commands: dict[str, Command], push_faults: Command) -> None:
    output, errors = commands["hangs"].communicate(timeout=220)
    figures = r"hangs ways=\d\d hung=0 wrong_names=0 longest_over_limit_s=[\d.e-]+ holds=yes"
    assert re.fullmatch(figures, output.splitlines()[-1]), output[-6000:] + errors[-3000:]
    assert commands["hangs"].returncode == 0


@pytest.mark.timeout(300)
def test_push_faults_holds_in_its_short_form(push_faults: Command) -> None:
    output, errors = push_faults.communicate(timeout=280)
    # How soon the others write is the machine's matter, which may be busy.
    figures = (
        r"push_faults pushes=\d+ faults=8 cut=\w+ unexpected_failures=0 wrong_tokens=0 tokens=[1-9]\d* "
        r"longest_push_s=[\d.]+ others_after_s=[\d.]+ back_after_s=[\d.]+ holds=(yes|no)"
    )
    assert re.fullmatch(figures, output.splitlines()[-1]), output[-6000:] + errors[-3000:]
