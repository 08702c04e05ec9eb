"""The sessions of a server: waiting for an agent, in progress, and the ends of earlier ones."""

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rollout.endpoint.requests import Refusal, RewardBody
from rollout.endpoint.session import AgentSession, SessionEnd

_NUM_REMEMBERED = 16_384
_NO_KEY = "Authorization: Bearer KEY is missing or unknown here. Each session has a key of its own"


class Sessions:
    """The sessions of one run."""

    def __init__(self, token: str, recent_s: float) -> None:
        """token: the cluster's; with it programs request samples and report for every session.

        recent_s: a program that requested a sample within this time is expected to request another one.
        """
        self._token = token
        self._recent_s = recent_s
        self._by_key: dict[str, AgentSession] = {}
        self._by_id: dict[str, AgentSession] = {}
        self._offered: asyncio.Queue[AgentSession | None] = asyncio.Queue()  # None wakes a program at the end
        self._ended: OrderedDict[str, SessionEnd] = OrderedDict()  # ended sessions by key and by id, oldest first
        self._num_asking = 0
        self._asked_at = float("-inf")
        self._is_closed = False

    @property
    def has_demand(self) -> bool:
        """Whether external programs request samples, or did recently."""
        return self._num_asking > 0 or time.monotonic() - self._asked_at < self._recent_s

    @property
    def num_open(self) -> int:
        """Number of sessions that have not ended."""
        return len(self._by_id)

    def open(self, session: AgentSession, is_offered: bool) -> None:
        """Add a session. is_offered: it waits for an external agent; otherwise it has one."""
        self._by_key[session.end.api_key] = self._by_id[session.end.id] = session
        if is_offered:
            self._offered.put_nowait(session)
        else:
            session.take()

    def close(self, session: AgentSession, reason: str) -> None:
        """Remove a session, and end it if it has not ended."""
        session.take_back(reason)
        end = session.end
        if self._by_id.pop(end.id, None) is None:
            return
        del self._by_key[end.api_key]
        self._ended[end.api_key] = self._ended[end.id] = end
        while len(self._ended) > 2 * _NUM_REMEMBERED:
            self._ended.popitem(last=False)

    def close_all(self, reason: str) -> None:
        """Remove every session. Programs that request a sample get none."""
        self._is_closed = True
        for session in list(self._by_id.values()):
            self.close(session, reason)
        for _ in range(self._num_asking):
            self._offered.put_nowait(None)

    async def take(self, wait_s: float) -> AgentSession | None:
        """Return a session for an external agent; None after wait_s, and once the sessions are closed."""
        self._num_asking += 1
        try:
            async with asyncio.timeout(wait_s):
                while not self._is_closed:
                    session = await self._offered.get()
                    if session is not None and session.end.reason is None:
                        session.take()
                        return session
        except TimeoutError:
            pass
        finally:
            self._num_asking -= 1
            self._asked_at = time.monotonic()
        return None

    def offer_again(self, session: AgentSession) -> None:
        """Offer a session again after its agent left before it got the sample."""
        session.offer_again()
        self._offered.put_nowait(session)

    def of_key(self, authorization: str | None) -> AgentSession:
        """Return the session of a request's key. Raises: Refusal; 410 for an ended session."""
        key = _bearer(authorization)
        if (session := self._by_key.get(key)) is not None:
            return session
        if (end := self._ended.get(key)) is not None and key == end.api_key:
            end.check_open()
        raise Refusal(401, _NO_KEY, code="invalid_api_key")

    def of_report(self, name: str, authorization: str | None) -> Callable[[RewardBody | None], dict[str, Any]]:
        """Return the function that ends the session of this id, for its own key or the cluster's token.

        The function returns the reply. Both raise Refusal.
        """
        session, key = self._by_id.get(name), _bearer(authorization)
        end = session.end if session is not None else self._ended.get(name)
        if end is not None and name != end.id:
            end = None
        if end is None or not hmac.compare_digest(key.encode(), end.api_key.encode()):
            self.check_token(authorization)
        if end is None:
            raise Refusal(404, f"there is no session {name[:80]} here, or it ended long ago")
        return end.report if session is None else session.report

    def check_token(self, authorization: str | None) -> None:
        """Raise Refusal for a request without the cluster's token."""
        if not hmac.compare_digest(_bearer(authorization).encode(), self._token.encode()):
            problem = "this needs the cluster's token: Authorization: Bearer TOKEN"
            raise Refusal(401, problem, code="invalid_api_key")


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
