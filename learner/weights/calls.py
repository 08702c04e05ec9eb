"""Calls to several rollout servers at once, each with a deadline and pings.

Pings find a stopped process or a cut link long before the deadline, which is for slow work.

Example: faults = await ask_all(servers, "prepare", lambda server: server.prepare(attempt, update), limits)
         # {"sluice-rollout-1": Fault("sluice-rollout-1 answered no ping for 8 s while it was to prepare")}
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.one_line import first_line
from protocol.weights.controls import ServerControls
from protocol.weights.group import PeerLostError

SILENCE_S = 8.0
ERROR_GRACE_S = 0.2
"""Wait for the other servers' own errors after a first failure."""
_NUM_PARTS = 8  # parts of the silence limit; a ping is sent in each


@dataclass(frozen=True)
class Fault:
    """Why a server does not have the current weights."""

    reason: str  # sentence without a full stop
    is_own: bool = True  # False: another member of its broadcast group failed, or the cause is unknown


Faults = dict[str, Fault]  # by server name


@dataclass(frozen=True)
class Limits:
    """How long a server may take."""

    deadline_s: float  # limit of each call, bucket and rendezvous
    silence_s: float = SILENCE_S  # limit without an answered ping


Call = Callable[[ServerControls], Coroutine[Any, Any, object]]


async def ask_all(
    servers: Sequence[ServerControls], verb: str, call: Call, limits: Limits, *, is_joint: bool = False
) -> Faults:
    """Call all servers at once and return their faults.

    verb: named in the faults. is_joint: the servers share a broadcast, so the first failure ends the other calls,
    without a fault: they could wait for the failed server forever.
    """
    calls = {asyncio.ensure_future(ask(server, verb, call, limits)): server.name for server in servers}
    pending = set(calls)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if is_joint and any(task.result() is not None for task in done):
                if pending:
                    await asyncio.wait(pending, timeout=ERROR_GRACE_S)
                break
        return {name: fault for task, name in calls.items() if task.done() and (fault := task.result()) is not None}
    finally:
        await _cancel(*calls)


async def ask(server: ServerControls, verb: str, call: Call, limits: Limits) -> Fault | None:
    """Call one server and return its fault, if any."""
    work, silence = asyncio.ensure_future(call(server)), asyncio.ensure_future(_silence(server, limits.silence_s))
    timeout_s = None if limits.deadline_s == float("inf") else limits.deadline_s
    try:
        await asyncio.wait({work, silence}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return None
        if silence.done():
            return Fault(f"{server.name} answered no ping for {limits.silence_s:g} s while it was to {verb}")
        return Fault(f"{server.name} did not {verb} within {limits.deadline_s} s")
    except Exception as error:  # a server may raise anything
        return Fault(
            f"{server.name} failed to {verb}: {first_line(error)}", is_own=not isinstance(error, PeerLostError)
        )
    finally:
        await _cancel(work, silence)


async def _silence(server: ServerControls, silence_s: float) -> None:
    """Return when no ping was answered for silence_s, at most an eighth later. A failed ping counts as unanswered."""
    await asyncio.sleep(silence_s / _NUM_PARTS)
    num_silent = 1  # consecutive parts; counted rather than timed, so that a pause of this process is one part
    while num_silent < _NUM_PARTS:
        ping = asyncio.ensure_future(server.ping())
        try:
            while not ping.done() and num_silent < _NUM_PARTS:
                await asyncio.wait({ping}, timeout=silence_s / _NUM_PARTS)
                num_silent += not ping.done()
        finally:
            ping.cancel()
        if ping.done():
            is_answered = not ping.cancelled() and ping.exception() is None
            num_silent = 0 if is_answered else num_silent + 1
            await asyncio.sleep(silence_s / _NUM_PARTS)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
