"""An engine's process ends with its server. Real vLLM on a tiny model."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.fakes.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.stack,
    pytest.mark.ranks,
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


async def test_engine_process_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=True)
    script = tmp_path / "server.py"
    script.write_text(_SERVER)
    command = [sys.executable, "-W", "ignore", str(script), str(folder)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=_environment())
    assert server.stdout is not None
    async with asyncio.timeout(180.0):
        while b"started" not in (line := await server.stdout.readline()):
            assert line, "the server ended before it had started"
    children = [child for child in psutil.Process(server.pid).children(recursive=True) if "EngineCor" in child.name()]
    server.kill()
    await server.wait()
    _, alive = psutil.wait_procs(children, timeout=10.0)

    assert len(children) == 1
    assert alive == []


_SERVER = """
import asyncio, sys
from rollout.engine.engine import Engine
from tests.fakes.tiny_models import engine_of

async def serve():
    engine = await Engine.start(engine_of(sys.argv[1]))
    print("started", engine.is_alive, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(serve())
"""


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": root}
