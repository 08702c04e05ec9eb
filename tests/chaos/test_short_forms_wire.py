"""What crosses the sockets, in the short form of each command."""

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "figure"),
    [
        (
            "tests.chaos.frame_fuzz",
            r"frame_fuzz frames=30000 tcp_frames=3000 valid=\d+ crashes=0 invalid_accepted=0 valid_refused=0 "
            r"growth_mb=-?[\d.e-]+ holds=yes",
        ),
        (
            "tests.chaos.strangers",
            r"strangers connections=600 frames_heard=0 answered=10 unanswered=0 late_answered=0 files_left=-?\d+ "
            r"growth_mb=-?[\d.e-]+ holds=yes",
        ),
        (
            "tests.benchmarks.coordinator_turn",
            r"coordinator_turn seed=1 runs=2 largest_ms=[\d.]+ slowest_median_ms=[\d.]+ holds=yes",
        ),
        ("tests.benchmarks.many_peers", r"many_peers peers=512 median_s=[\d.]+ slowest_s=[\d.]+ holds=yes"),
    ],
)
def test_command_holds_in_its_short_form(command: str, figure: str) -> None:
    done = subprocess.run([sys.executable, "-m", command, "--short"], capture_output=True, text=True, timeout=240)
    assert re.fullmatch(figure, done.stdout.splitlines()[-1]), done.stdout + done.stderr
    assert done.returncode == 0


def test_ingest_takes_every_trajectory_in() -> None:
    # The rate is the machine's matter, which may be busy; that all are accepted and in the ledger is not.
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.ingest", "--short"], capture_output=True, text=True, timeout=240
    )
    assert re.fullmatch(r"ingest per_s=[\d.]+ .* holds=(yes|no)", done.stdout.splitlines()[-1]), done.stderr
