"""Rows, environments and services that do anything at all, in the short form of the command."""

import re
import subprocess
import sys


def test_hostile_rows_fail_their_own_samples_alone() -> None:
    command = [sys.executable, "-m", "tests.chaos.hostile_rows", "--seed", "1", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    figure = (
        r"hostile_rows rows=240 hostile=120 refused_rows=[1-9]\d* without_reason=0 servers_ended=0 bystanders_failed=0 "
        r"unfinished=0 lost_leases=0 messages_refused=0 holds=yes"
    )
    assert re.fullmatch(figure, done.stdout.splitlines()[-1]), done.stdout + done.stderr
    assert done.returncode == 0
