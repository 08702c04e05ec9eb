"""deploy/start_cluster.sh, before it is Python: how many files its processes may open, and who reads its input."""

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # -1: no limit


def started(tmp_path: Path, limits: str, python: str = 'echo "$(ulimit -Sn) $*"') -> "subprocess.CompletedProcess[str]":
    """Return a start under these limits, given a code, with this in place of Python."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "start_cluster.sh", tmp_path / "deploy")
    for script, text in (("deploy/setup.sh", "cat >/dev/null"), (".venv/bin/python", python)):
        (tmp_path / script).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (tmp_path / script).chmod(0o755)
    command = f"{limits} && exec {tmp_path}/deploy/start_cluster.sh --block"
    return subprocess.run(["bash", "-c", command], input="A CODE\n", capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(0 < MOST < 10_000, reason="this machine lets no process open 10,000 files")
def test_open_files_are_raised_to_what_a_large_run_needs(tmp_path: Path) -> None:
    done = started(tmp_path, "ulimit -Sn 256")
    raised = 65536 if MOST < 0 else min(MOST, 65536)
    assert (done.stdout, done.stderr) == (f"{raised} -m deploy.cluster start --block\n", "")


def test_too_low_a_limit_of_the_machine_is_said(tmp_path: Path) -> None:
    done = started(tmp_path, "ulimit -Sn 256 && ulimit -Hn 4096")
    assert done.stdout == "4096 -m deploy.cluster start --block\n"
    assert done.stderr == (
        "start_cluster: a process may open 4096 files here (ulimit -Hn); hundreds of servers or agents need 65536. "
        "Raise LimitNOFILE, docker's --ulimit nofile or limits.conf.\n"
    )
