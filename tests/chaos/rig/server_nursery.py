"""Rollout servers in processes of their own, forked from one that has no threads, so that they can be started again.

`RolloutServer` on a `MemoryEngine`, its weight verbs over TCP. A fault is told to a server before it strikes: the
server itself stops, dies, dawdles or cuts its link when it reaches the state.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from protocol.settings.run_spec import EngineRequest
from rollout.server import RolloutServer
from tests.chaos.rig.control_line import serve_controls
from tests.chaos.rig.memory_engine import MemoryEngine
from tests.chaos.rig.processes import ENGINE

STATES = ("join", "prepare", "receive", "bucket", "commit", "committed", "serve")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Fault:
    """What strikes a server in a state of its next push, once."""

    kind: str  # killed, stopped, slowed or cut
    state: str  # of STATES
    number: int  # of the fault in its command; names the file that says that it struck
    delay_s: float = 0.0  # of a slowed server
    cut: tuple[str, ...] = ()  # the command that cuts a server's link
    struck: str = ""  # path of the file


@dataclass(frozen=True)
class Place:
    """Where a server lives."""

    host: str  # its address
    port: int  # of its weight verbs
    enter: Callable[[], None] | None = None  # moves a process to its host; None: it is the nursery's


class Nursery:
    """Starts servers by name. Everything that it started is killed when it, or the process that made it, ends."""

    def __init__(self, places: dict[str, Place], seed: int) -> None:
        self._pipe, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_keep, args=(theirs, self._pipe, places, seed), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, name: str, fault: Fault | None = None) -> None:
        """Start a server, in place of one that is there. fault: what strikes it, from its first call on."""
        self._tell("start", name, fault)

    def kill(self, name: str) -> None:
        """Kill a server, which may be dead already."""
        self._tell("kill", name, None)

    def go_on(self, name: str) -> None:
        """Let a stopped server go on."""
        self._tell("go on", name, None)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20.0)

    def _tell(self, verb: str, name: str, fault: Fault | None) -> None:
        self._pipe.send((verb, name, fault))
        self._pipe.recv()


class DisturbedServer:
    """A rollout server's verbs, one of which a fault strikes; and `answer`, which asks it for tokens."""

    def __init__(self, server: RolloutServer, engine: MemoryEngine, fault: Fault | None) -> None:
        self._server = server
        self._engine = engine
        self._fault = fault

    async def arm(self, fault: dict[str, Any]) -> None:
        self._fault = Fault(**{**fault, "cut": tuple(fault["cut"])})

    async def answer(self, num_tokens: int) -> Any:
        return await self._engine.write(num_tokens)

    def __getattr__(self, verb: str) -> Any:
        async def obey(*arguments: Any) -> Any:
            state = verb.removesuffix("_weights")
            await asyncio.sleep(self.meet(state, may_block=False))
            answer = await getattr(self._server, verb)(*arguments)
            if state == "commit":
                await asyncio.sleep(self.meet("committed", may_block=False))
            return answer

        return obey

    def meet(self, state: str, may_block: bool = True) -> float:
        """Have the fault of this state strike. Returns how long to dawdle where that may not block the event loop."""
        fault = self._fault
        if fault is None or fault.state != state:
            return 0.0
        self._fault = None
        Path(fault.struck).touch()
        match fault.kind:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                subprocess.run(fault.cut, check=True)
            case "slowed" if may_block:
                time.sleep(fault.delay_s)
            case "slowed":
                return fault.delay_s
        return 0.0


def _keep(pipe: Connection, theirs: Connection, places: dict[str, Place], seed: int) -> None:
    """Start, kill and wake servers as told, until nobody tells any more; they end with this process."""
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pids: dict[str, int] = {}
    with suppress(EOFError):
        while True:
            verb, name, fault = pipe.recv()
            if verb == "go on":
                os.kill(pids[name], signal.SIGCONT)
            elif name in pids:  # nobody else waits for it: the number is still its own
                os.kill(pid := pids.pop(name), signal.SIGKILL)
                os.waitpid(pid, 0)
            if verb == "start":
                if (pid := os.fork()) == 0:
                    _live(pipe, name, places[name], seed, fault)
                pids[name] = pid
            pipe.send(True)


def _live(pipe: Connection, name: str, place: Place, seed: int, fault: Fault | None) -> None:
    """Be a server, and never return."""
    pipe.close()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    try:
        if place.enter is not None:
            place.enter()
        asyncio.run(_serve(name, place, seed, fault))
    except BaseException as error:
        print(f"[{name}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


async def _serve(name: str, place: Place, seed: int, fault: Fault | None) -> None:
    engine = MemoryEngine(seed ^ os.getpid())

    async def start_engine(_: EngineRequest) -> MemoryEngine:
        return engine

    server = RolloutServer(name, ENGINE, start_engine)
    await server.start()
    disturbed = DisturbedServer(server, engine, fault)
    engine.on_bucket = lambda: disturbed.meet("bucket")
    await serve_controls(disturbed, place.host, place.port)
    await asyncio.Event().wait()
