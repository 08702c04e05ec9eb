"""A reader follows the tutorials: the blocks run in the order of the pages, in a folder and on a cluster of their own.

A block may have an HTML comment `CI` above it, with the form for CI: `TEXT -> OTHER TEXT` replaces a part of the block,
another line is a command that comes first, and `CI: not run here; REASON` leaves the block out.
"""

import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes.ports import free_port

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

_CHECKOUT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(?:^<!-- CI(: not run here; .+ -->$|.*?^-->)\n)?^```(\w+)\n(.*?)^```", re.M | re.S)
_FILE = re.compile(r"# (\S+)\n")  # first line of a block that is a file
_ports: defaultdict[str, int] = defaultdict(free_port)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the reader's folder, with the parts of a checkout that the pages name; its cluster is ended afterwards."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "deploy").mkdir()
    (folder / "deploy" / "configs").symlink_to(_CHECKOUT / "deploy" / "configs")
    script = folder / "deploy" / "start_cluster.sh"
    script.write_text(f'exec bash {_CHECKOUT}/deploy/start_cluster.sh "$@"\n')
    script.chmod(0o700)
    (folder / ".venv").symlink_to(sys.prefix)
    yield folder
    _bash("sluice stop", folder)


@pytest.mark.parametrize("page", ["first_run", "reward", "environment", "gsm8k", "cluster"])
def test_every_block_of_a_tutorial_runs(page: str, folder: Path) -> None:
    text = (_CHECKOUT / "docs" / "learn" / f"{page}.md").read_text("utf-8")
    script = "".join(_command(*block) for block in _BLOCK.findall(text))
    finished = _bash(re.sub(r"FREE_PORT_\w+", lambda name: str(_ports[name[0]]), script), folder)
    assert finished.returncode == 0, finished.stdout


def _command(form: str, kind: str, block: str) -> str:
    """Return what the reader gives for a block; a file's block is written."""
    if form.startswith(": not run here"):
        return ""
    before = ""
    for line in form.splitlines()[1:-1]:
        text, arrow, other = line.partition(" -> ")
        assert not arrow or text in block, f"{text} is not in the block:\n{block}"
        before, block = (before, block.replace(text, other)) if arrow else (f"{before}{line}\n", block)
    name = _FILE.match(block)
    return before + (block if kind == "bash" else f"cat >{name and name[1]} <<'END'\n{block}END\n")


def _bash(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Return the finished script, with its output as text. Its processes in the background are ended."""
    environment = {
        **os.environ, "SLUICE_HOME": str(folder / "home"), "SLUICE_LOCK": "none", "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    with (folder / "output").open("w+", encoding="utf-8") as output:
        shell = subprocess.Popen(
            ["bash", "-xeuo", "pipefail", "-c", script],
            cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            status = shell.wait(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
        output.seek(0)
        return subprocess.CompletedProcess(script, status, output.read())
