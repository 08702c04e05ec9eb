"""One call to each of several servers at once, where one that fails concerns no other: to sleep, and to wake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from learner.weights.presence import SilentServersError, while_present
from protocol.one_line import first_line
from protocol.weights.controls import Attempt, ServerControls

Turn = Literal["sleep", "wake"]


async def have_all(
    servers: Sequence[ServerControls], attempt: Attempt, turn: Turn, deadline_s: float, silence_s: float
) -> dict[str, str]:
    """Return, by name, why a server did not do so. attempt: newer than those of all turns before.

    deadline_s: limit of each call. silence_s: limit without an answer to a ping.
    """

    async def fault(server: ServerControls) -> str | None:
        try:
            call = server.sleep(attempt) if turn == "sleep" else server.wake(attempt)
            async with asyncio.timeout(deadline_s):
                await while_present([server], silence_s, call)
        except SilentServersError as error:
            return f"{error} while it was to {turn}"
        except TimeoutError:
            return f"{server.name} did not {turn} within {deadline_s} s"
        except Exception as error:  # a neighbour's, whatever it raises
            return f"{server.name} failed to {turn}: {first_line(error)}"
        return None

    faults = await asyncio.gather(*map(fault, servers))
    return {server.name: said for server, said in zip(servers, faults, strict=True) if said is not None}
