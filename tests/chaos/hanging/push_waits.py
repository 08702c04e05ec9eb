"""A weight push that waits for one of two servers in each of its states; the other server must get the weights."""

import asyncio
import os
import signal
import socket
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from learner.weights.push import WeightPusher
from tests.chaos.hanging.way import Way, fork, timed
from tests.chaos.rig.control_line import ControlLine, serve_controls
from tests.fakes.cuttable_link import CuttableLink
from tests.fakes.planned_weights import planned
from tests.learner.weights.fake_server import FakeServer

_DEADLINE_S = 2.0
_SILENCE_S = 1.0
_BUCKET_BYTES = 4000
_STATES = ("join", "prepare", "receive", "commit", "probe")
_CUT_AT = ("join", "prepare", "commit", "probe")


def push_ways() -> list[Way]:
    stalls = [
        Way(f"server_stalls_at_{state}", _DEADLINE_S, _said_of_stall(state), partial(_push, "stalls", state))
        for state in _STATES
    ]
    silent = [
        Way(
            f"server_{fault}_at_{state}",
            _SILENCE_S,
            (f"victim answered no ping for {_SILENCE_S:g} s while it was to {state}",),
            partial(_push, fault, state),
        )
        for fault, states in (("stopped", _STATES), ("cut", _CUT_AT))
        for state in states
    ]
    return [*stalls, *silent]


def _said_of_stall(state: str) -> tuple[str, ...]:
    # Gloo has the same limit for a bucket, and may be the first to notice.
    if state == "receive":
        return ("victim did not take a bucket",)
    return f"victim did not {state}", f"within {_DEADLINE_S} s"


class _Victim:
    """A server in a process of its own that stands still when it is told a verb."""

    def __init__(self, fault: str, verb: str) -> None:
        self._server = FakeServer("victim")
        self._fault = fault
        self._verb = verb
        self._is_armed = verb == "join"

    def __getattr__(self, verb: str) -> Any:
        async def obey(*arguments: Any) -> Any:
            if verb.removesuffix("_weights") == self._verb and self._is_armed:
                if self._fault == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if self._fault == "stalls":
                    await asyncio.sleep(3600)
            # The first push goes well, so that the fault meets a server that is at work.
            self._is_armed |= verb == "commit"
            return await getattr(self._server, verb)(*arguments)

        return obey


class _CutLine(ControlLine):
    """A control line whose link is cut when a verb is about to be told."""

    def __init__(self, link: CuttableLink, verb: str) -> None:
        super().__init__("victim", link.host, link.port)
        self._link = link
        self._verb = verb
        self.is_armed = verb in ("join", "probe")

    async def _call(self, verb: str, *arguments: Any) -> Any:
        if verb.removesuffix("_weights") == self._verb and self.is_armed:
            self._link.cut()
        self.is_armed |= verb == "commit"
        return await super()._call(verb, *arguments)


def _serve(pipe: Connection, fault: str, verb: str) -> None:
    async def serve() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        await serve_controls(_Victim(fault, verb), "127.0.0.1", port)
        pipe.send(port)
        await asyncio.sleep(3600)

    asyncio.run(serve())


def _push(fault: str, verb: str, folder: Path) -> tuple[str, float]:
    _, pipe = fork(_serve, fault, verb)
    port = pipe.recv()
    line = ControlLine("victim", "127.0.0.1", port)
    if fault == "cut":
        line = _CutLine(CuttableLink("127.0.0.1", port), verb)
    pusher = WeightPusher([FakeServer("near"), line], "127.0.0.1", "gloo", _DEADLINE_S, silence_s=_SILENCE_S)
    if verb != "join":
        _push_version(pusher, 1)
    if verb == "probe":
        return timed(lambda: _probe(pusher))
    return timed(lambda: _push_version(pusher, 2))


def _push_version(pusher: WeightPusher, version: int) -> str:
    weights = [("weights", torch.full((3000,), float(version)))]
    report = pusher.push(version, *planned(weights, _BUCKET_BYTES))
    if "near" not in report.synced:
        return f"the other server was not synced: {report.failed}"
    return report.failed.get("victim", "nothing")


def _probe(pusher: WeightPusher) -> str:
    faults = pusher.verify(1, [1, 2, 3])
    return faults.get("victim", "nothing") if "near" not in faults else f"the other server was not asked: {faults}"
