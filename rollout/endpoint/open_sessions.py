"""The sessions of a server: those that wait for an agent, those under way, and why others have ended."""

import asyncio
import hmac
import time
from collections import OrderedDict
from typing import Any

from rollout.endpoint.agent_session import AgentSession
from rollout.endpoint.bodies import RewardBody
from rollout.endpoint.refusals import Refused
from rollout.endpoint.session_end import SessionEnd

_NUM_REMEMBERED = 16_384
_NO_KEY = "Authorization: Bearer KEY is missing or unknown here. Each session has a key of its own"


class OpenSessions:
    """In the endpoint's event loop, but for `is_asked_for`."""

    def __init__(self, token: str, asked_within_s: float) -> None:
        """token: the cluster's, which asks for samples and speaks for every session.

        asked_within_s: how long an agent that asked for a sample counts as one that will ask again.
        """
        self._token = token
        self._asked_within_s = asked_within_s
        self._by_key: dict[str, AgentSession] = {}
        self._by_id: dict[str, AgentSession] = {}
        self._offered: asyncio.Queue[AgentSession] = asyncio.Queue()
        # Keys and ids of sessions that are no more here, oldest first.
        self._gone: OrderedDict[str, SessionEnd] = OrderedDict()
        self._num_asking = 0
        self._asked_at = float("-inf")

    @property
    def is_asked_for(self) -> bool:
        """Whether programs outside ask for samples, or did a moment ago; from any thread."""
        return self._num_asking > 0 or time.monotonic() - self._asked_at < self._asked_within_s

    @property
    def num_open(self) -> int:
        """Sessions that have not ended."""
        return len(self._by_id)

    def open(self, session: AgentSession, is_offered: bool) -> None:
        """Take in a session. is_offered: it waits for an agent that asks; otherwise it has one."""
        self._by_key[session.end.api_key] = self._by_id[session.end.id] = session
        if is_offered:
            self._offered.put_nowait(session)
        else:
            session.take()

    def close(self, session: AgentSession, why: str) -> None:
        """Forget a session, which ends if it has not."""
        session.take_back(why)
        end = session.end
        if self._by_id.pop(end.id, None) is None:
            return
        del self._by_key[end.api_key]
        self._gone[end.api_key] = self._gone[end.id] = end
        while len(self._gone) > 2 * _NUM_REMEMBERED:
            self._gone.popitem(last=False)

    def close_all(self, why: str) -> None:
        """Forget every session."""
        for session in list(self._by_id.values()):
            self.close(session, why)

    async def take(self, wait_s: float) -> AgentSession | None:
        """Return a session for an agent that asks; None when none was there within wait_s."""
        self._num_asking += 1
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    session = await self._offered.get()
                    if session.end.because is None:
                        session.take()
                        return session
        except TimeoutError:
            return None
        finally:
            self._num_asking -= 1
            self._asked_at = time.monotonic()

    def give_back(self, session: AgentSession) -> None:
        """Offer a session again whose agent left before it was told of it."""
        session.wait_again()
        self._offered.put_nowait(session)

    def of_key(self, authorization: str | None) -> AgentSession:
        """Return the session of a request's key. Raises: Refused, 410 for one that is no more here."""
        key = _bearer(authorization)
        if (session := self._by_key.get(key)) is not None:
            return session
        if (end := self._gone.get(key)) is not None and key == end.api_key:
            end.check_open()
        raise Refused(401, _NO_KEY, code="invalid_api_key")

    def report(self, name: str, authorization: str | None, reward: RewardBody | None) -> dict[str, Any]:
        """Take the end of the session of this id, for its own key or the cluster's token; returns what is told of it.

        Raises: Refused with the reason why it is not counted.
        """
        session, key = self._by_id.get(name), _bearer(authorization)
        end = session.end if session is not None else self._gone.get(name)
        if end is not None and name != end.id:
            end = None
        if end is None or not hmac.compare_digest(key.encode(), end.api_key.encode()):
            self.check_token(authorization)
        if end is None:
            raise Refused(404, f"there is no session {name[:80]} here, or its end is long ago")
        return end.report(reward) if session is None else session.report(reward)

    def check_token(self, authorization: str | None) -> None:
        """Raise Refused for a request that does not bring the cluster's token."""
        if not hmac.compare_digest(_bearer(authorization).encode(), self._token.encode()):
            raise Refused(401, "this asks for the cluster's token: Authorization: Bearer TOKEN", code="invalid_api_key")


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
