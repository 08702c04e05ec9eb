"""How an engine's process ends: noticed by its server, and with its server. Real vLLM on a tiny model."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from protocol.errors import NeighbourError
from rollout.engine.generation import Sampling
from tests.fakes.tiny_models import engine_of, make_tiny_model, start_loaded

pytestmark = [
    pytest.mark.stack,
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

PROMPT = [20, 21, 14, 22, 23, 32]


async def test_death_of_the_engine_process_is_noticed_at_once(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tied=True)
    known = set(psutil.Process().children(recursive=True))
    # In bfloat16, where a CPU with AMX ends an engine process that has not asked for leave.
    engine = await start_loaded(engine_of(folder, "bfloat16"), 0)
    task = asyncio.create_task(engine.generate(PROMPT, Sampling(480, 1.0, seed=2), "dying"))
    await engine.generate(PROMPT, Sampling(4, 1.0, seed=3), "short")  # the other one is under way
    for process in set(psutil.Process().children(recursive=True)) - known:
        if "EngineCor" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(20.0):
        with pytest.raises(
            NeighbourError, match=r"^engine: request dying died with the engine \(EngineCore\w* died by SIGKILL\)"
        ):
            await task

    assert not engine.is_alive
    engine.shutdown()


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
