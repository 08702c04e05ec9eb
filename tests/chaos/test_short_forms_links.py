"""Cut links and waits for who does not answer, in the short form of their commands."""

import re
import subprocess
import sys

import pytest

_SKIPPED = 77  # this machine cannot make network namespaces

_FIGURES = (
    r"partition cut_s=[\d.]+ steps_while_cut=\d+ standstill_s=[\d.]+ longest_push_s=[\d.]+ synced_after_s=[\d.]+ "
    r"used_after_s=[\d.]+ kept_results=\d+ taken_back=\d+ skipped=0 audit=passed holds=yes"
)


@pytest.mark.timeout(300)
def test_partition_holds_in_its_short_form() -> None:
    command = [sys.executable, "-m", "tests.chaos.partition", "--seed", "1", "--short"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if finished.returncode == _SKIPPED:
        pytest.skip(finished.stdout.strip())
    last = finished.stdout.splitlines()[-1]
    assert re.fullmatch(_FIGURES, last), finished.stdout[-3000:] + finished.stderr[-3000:]
    assert finished.returncode == 0


@pytest.mark.timeout(240)
def test_hangs_holds_in_its_short_form() -> None:
    command = [sys.executable, "-m", "tests.chaos.hangs", "--seed", "1", "--short"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=220)
    last = finished.stdout.splitlines()[-1]
    figures = r"hangs ways=\d\d hung=0 wrong_names=0 longest_over_limit_s=[\d.e-]+ holds=yes"
    assert re.fullmatch(figures, last), finished.stdout[-6000:] + finished.stderr[-3000:]
    assert finished.returncode == 0
