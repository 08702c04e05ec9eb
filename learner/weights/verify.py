"""Whether what servers compute after a push is what the learner computes; those of which it is so serve the version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from learner.weights.presence import SilentServersError, while_present
from protocol.one_line import first_line
from protocol.weights.controls import Attempt, ServerControls

Judge = Callable[[str, list[float]], str | None]
"""(a server's name, its logprobs of the probe) -> what is wrong with them; None: nothing."""


async def verify(
    synced: Sequence[tuple[ServerControls, Attempt]],
    version: int,
    tokens: list[int],
    judge: Judge,
    deadline_s: float,
    silence_s: float,
) -> dict[str, str]:
    """Have each server serve `version` if `judge` finds its logprobs of tokens[1:] right; return why not, by name.

    synced: servers, each with the attempt by which it got the version. tokens: none when there is nothing to judge by.
    One server's failure concerns no other.
    deadline_s: limit of each of both calls. silence_s: limit without an answer to a ping.
    """
    verified = [_Verified(*each, version, tokens, judge, deadline_s).fault(silence_s) for each in synced]
    faults = await asyncio.gather(*verified)
    return {server.name: fault for (server, _), fault in zip(synced, faults, strict=True) if fault is not None}


class _Verified:
    """One server between its commit and its first turn."""

    def __init__(
        self,
        server: ServerControls,
        attempt: Attempt,
        version: int,
        tokens: list[int],
        judge: Judge,
        deadline_s: float,
    ) -> None:
        self._server = server
        self._attempt = attempt
        self._version = version
        self._tokens = tokens
        self._judge = judge
        self._deadline_s = deadline_s
        self._state = "probe"  # what it was last asked to do

    async def fault(self, silence_s: float) -> str | None:
        """Return why it does not serve, None where it does."""
        name = self._server.name
        try:
            return await while_present([self._server], silence_s, self._ask())
        except SilentServersError as error:
            return f"{error} while it was to {self._state}"
        except TimeoutError:
            return f"{name} did not {self._state} within {self._deadline_s} s"
        except Exception as error:  # a neighbour's, whatever it raises
            return f"{name} failed to {self._state}: {first_line(error)}"

    async def _ask(self) -> str | None:
        if self._tokens:
            async with asyncio.timeout(self._deadline_s):
                logprobs = await self._server.probe(self._attempt, self._tokens)
            if (fault := self._judge(self._server.name, logprobs)) is not None:
                return fault
        self._state = "serve"
        async with asyncio.timeout(self._deadline_s):
            await self._server.serve(self._attempt, self._version)
        return None
