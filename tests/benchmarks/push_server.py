"""A rollout server for the benchmarks of weight pushes: a real engine in a process of its own, behind a control line.

    python -m tests.benchmarks.push_server MODEL PORT WAY

It ends when its standard input does. WAY: how pushes come, "second_copy" or "in_place" over gloo, or "ipc".
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.weights.controls import Attempt
from protocol.weights.group import GlooGroup
from tests.chaos.rig.control_line import HOST, ControlLine, serve_controls, served
from tests.fakes.ports import free_port


class MeasuredLine(ControlLine):
    """The learner's end: a server's weight controls, and what is measured of it."""

    async def take_plainly(self, init: dict[str, Any], sizes: Sequence[int]) -> None:
        """Join a group of its own and receive so many bytes in each broadcast, for nothing."""
        await self._call("take_plainly", init, list(sizes))

    async def reset_peak(self) -> None:
        await self._call("reset_peak")

    async def extra_bytes(self) -> int:
        """Return by how much the engine's process was larger, at most, than when `reset_peak` was called."""
        return int(await self._call("extra_bytes"))


class MeasuredServer:
    """The server's end."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._pid = engine._processes[0].pid
        self._before = 0

    def __getattr__(self, verb: str) -> Any:
        """The weight controls are the engine's own, which does not ask whose call it is."""

        async def call(attempt: Attempt, *arguments: Any) -> Any:
            return await getattr(self._engine, verb)(*arguments)

        return call

    async def ping(self) -> None:
        pass

    async def serve(self, attempt: Attempt, version: int) -> None:
        """An engine alone serves what was committed."""

    async def take_plainly(self, init: dict[str, Any], sizes: Sequence[int]) -> None:
        def take() -> None:
            import torch

            group = GlooGroup.join(init)
            flat = torch.ones(max(sizes), dtype=torch.uint8)
            for size in sizes:
                group.broadcast(flat[:size])

        await asyncio.to_thread(take)

    async def reset_peak(self) -> None:
        self._before = reset_peak(self._pid)

    async def extra_bytes(self) -> int:
        return peak_bytes(self._pid) - self._before


@contextmanager
def served_models(model: Path, num_servers: int, way: str) -> Iterator[list[tuple[str, int]]]:
    """Yield (name, port) of servers of this model; they have ended when the context has."""
    places = [(f"server-{number}", free_port()) for number in range(num_servers)]
    with served({port: ["tests.benchmarks.push_server", str(model), str(port), way] for _, port in places}):
        yield places


def reset_peak(pid: int | str) -> int:
    """Begin anew to look for the most memory that a process has; returns what it has now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(pid, "VmRSS")


def peak_bytes(pid: int | str) -> int:
    return _memory(pid, "VmHWM")


def _memory(pid: int | str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


async def _serve(model: Path, port: int, way: str) -> None:
    # Not above: vLLM's engine process imports this module too.
    from rollout.engine.engine import Engine
    from tests.fakes.tiny_models import engine_of

    dtype = json.loads((model / "config.json").read_text())["dtype"]
    request = engine_of(model, dtype, second_copy=way == "second_copy")
    if way == "ipc":
        request = request.model_copy(update={"weights_backend": "ipc"})
    engine = await Engine.start(request)
    await serve_controls(MeasuredServer(engine), HOST, port)
    await asyncio.to_thread(sys.stdin.read)
    engine.shutdown()
    os._exit(0)  # connections that the learner left open would each say so


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
