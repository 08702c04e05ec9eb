"""The short forms of the benchmarks of large ledgers and large data sets hold."""

import re
import subprocess
import sys
from pathlib import Path


def test_ledger_recovery_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.ledger_recovery", "--short", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"ledger_recovery prompts=50000 ledger_mb=\S+ open_s=\S+ .* recovery_s=\S+ .* holds=yes", line)


def test_many_prompts_holds() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.many_prompts", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"many_prompts rows=20000 check_s=\S+ .* holds=yes", done.stdout.splitlines()[-1])
