"""How many files the processes of a start may open."""

import resource
import subprocess
import sys

import pytest

MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # -1: no limit


def started(limits: str) -> "subprocess.CompletedProcess[str]":
    """Return a process that prints its limit after it was raised, begun under these limits."""
    code = "import resource, deploy.node.processes as p; p.allow_many_files(); print(resource.getrlimit(7)[0])"
    command = f"{limits} && exec {sys.executable} -c '{code}'"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(0 < MOST < 10_000, reason="this machine lets no process open 10,000 files")
def test_open_files_are_raised_to_what_a_large_run_needs() -> None:
    done = started("ulimit -Sn 256")
    raised = 65536 if MOST < 0 else min(MOST, 65536)
    assert (done.stdout, done.stderr) == (f"{raised}\n", "")


def test_too_low_a_limit_of_the_machine_is_said() -> None:
    done = started("ulimit -Sn 256 && ulimit -Hn 4096")
    assert done.stdout == "4096\n"
    assert done.stderr == (
        "sluice start: a process may open 4096 files here (ulimit -Hn); hundreds of servers or agents need 65536. "
        "Raise LimitNOFILE, docker's --ulimit nofile or limits.conf.\n"
    )
