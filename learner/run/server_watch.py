"""Keeps a run's rollout servers attached: a server that Ray restarted is started, attached and so used again.

Polled by the driver; never blocks. Rank 0 brings the server to the current weights at its next push.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learner.cluster.servers import RAY_CALLS, ServerCalls
from protocol.errors import AwayError, NeighbourError, OperatorError
from protocol.settings.run_spec import RunSpec

_LOOPBACK = "127.0.0.1"
# In a row: a server that has served for a minute is well again.
_MAX_REVIVALS = 5
_WELL_AFTER_S = 60.0
# Its node is gone, and no other one has room: one may join, as long as others serve the run.
_AWAY_S = 600.0
# A server's event loop answers at once; its engine's work is not awaited.
SILENCE_S = 30.0


@dataclass
class _Watched:
    """One server, as far as its last answer tells."""

    name: str
    node_ip: str = _LOOPBACK  # of the node that it was on when it last answered; loopback: this machine is all there is
    is_serving: bool = True  # attached to this run
    is_new: bool = False  # it has not served this run yet
    serving_since: float = 0.0  # seconds of the clock
    num_revivals: int = 0  # since it last served for a minute
    pending: Any = None  # the call under way
    asked_at: float = 0.0  # seconds of the clock at which it was asked
    away_since: float | None = None  # seconds of the clock at which Ray had no process of it; None: it has one
    is_silent: bool = False  # the user was told that it does not answer
    then: str = "ask"  # what its answer is for

    def __str__(self) -> str:
        return self.name if self.node_ip == _LOOPBACK else f"{self.name} on node {self.node_ip}"


class ServerWatch:
    """Call `poll` every few seconds."""

    def __init__(
        self,
        names: Sequence[str],
        spec: RunSpec,
        lost: Callable[[str, str], None],
        calls: ServerCalls = RAY_CALLS,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = SILENCE_S,
        check: Callable[[Mapping[str, Any]], None] = lambda runs: None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """check: gets what an attached server says of the run, by its name; raises OperatorError if it may not serve.

        lost: told (server, reason) as soon as a server is found not to serve the run. calls: asks servers.

        files: small files of the model, for a server that starts.
        clock: in seconds. silence_s: longest time without an answer before the user is told.
        """
        self._clock = clock
        self._silence_s = silence_s
        self._servers = [_Watched(name, serving_since=clock()) for name in names]
        self._spec = spec
        self._lost = lost
        self._calls = calls
        self._check = check
        self._files = files

    @property
    def num_serving(self) -> int:
        return sum(server.is_serving for server in self._servers)

    @property
    def num_hopeful(self) -> int:
        """Servers that serve or may yet."""
        return sum(map(self._is_hopeful, self._servers))

    def add(self, names: Sequence[str]) -> None:
        """Look after these servers too, which are new: they are attached, and serve from the next push on."""
        self._servers += [_Watched(name, is_serving=False, is_new=True) for name in names]

    def forget(self, name: str) -> None:
        """Look after a server no more: it is taken from the run."""
        self._servers = [server for server in self._servers if server.name != name]

    def are_serving(self, names: Sequence[str]) -> bool:
        """Return whether all of these servers are attached to the run."""
        return all(server.is_serving for server in self._servers if server.name in names)

    def are_hopeful(self, names: Sequence[str]) -> bool:
        """Return whether each of these servers serves or may yet."""
        return all(self._is_hopeful(server) for server in self._servers if server.name in names)

    def poll(self) -> list[str]:
        """Take answers that have come and ask on; returns what the user should be told."""
        return [message for server in self._servers if (message := self._advance(server)) is not None]

    def _is_hopeful(self, server: _Watched) -> bool:
        if server.num_revivals > _MAX_REVIVALS:
            return server.is_serving
        return server.away_since is None or self._clock() - server.away_since <= _AWAY_S

    def _advance(self, server: _Watched) -> str | None:
        if server.pending is None:
            server.pending, server.then = self._ask(server, "describe"), "judge"
            return None
        if not self._calls.is_done(server.pending):
            return self._note_silence(server)
        server.is_silent = False
        reference, server.pending = server.pending, None
        try:
            answer = self._calls.result(reference, server.name)
        except AwayError as error:
            return self._await_return(server, str(error))
        except (NeighbourError, OperatorError) as error:
            return self._fail(server, str(error))
        server.node_ip = answer.get("node_ip", server.node_ip)
        if server.then == "judge":
            return self._judge(server, answer)
        if server.then == "attach":
            server.pending, server.then = self._ask(server, "attach"), "serve"
            return None
        if server.then == "detach":
            return None
        try:
            self._check({server.name: answer["run"]})
        except OperatorError as error:
            return self._refuse(server, str(error))
        server.is_serving, server.serving_since = True, self._clock()
        again, server.is_new = "" if server.is_new else " again", False
        return f"{server} serves{again}, from the next push on"

    def _await_return(self, server: _Watched, reason: str) -> str | None:
        """Take its leases back and ask until it is there: a call that finds no process is no start that failed."""
        if server.away_since is None:
            server.away_since = self._clock()
        server.pending, server.then = self._ask(server, "describe"), "judge"
        return self._lose(server, reason)

    def _judge(self, server: _Watched, described: dict[str, Any]) -> str | None:
        if server.away_since is not None:
            server.away_since = None
            return self._fail(server, "it was away")
        run = described["run"]
        is_ours = run is not None and run["run_id"] == self._spec.run_id
        if is_ours and run["incarnation"] == self._spec.incarnation and run["ended"] is None:
            self._note_serving(server)
            return None
        if server.num_revivals > _MAX_REVIVALS:
            return None
        if run is None:
            return self._fail(server, "it was restarted")
        if not is_ours:
            return self._fail(server, f"it serves another run, {run['run_id']}")
        if run["ended"] is None:
            return self._fail(server, "it serves another start of this run")
        return self._fail(server, f"its session ended: {run['ended']}")

    def _note_serving(self, server: _Watched) -> None:
        if not server.is_serving:
            server.is_serving, server.serving_since = True, self._clock()
        elif self._clock() - server.serving_since > _WELL_AFTER_S:
            server.num_revivals = 0

    def _fail(self, server: _Watched, reason: str) -> str | None:
        """Take its leases back and have it start; Ray has restarted the process."""
        if server.num_revivals > _MAX_REVIVALS:
            return None  # it was given up, and that was told
        message = self._lose(server, reason)
        server.num_revivals += 1
        if server.num_revivals > _MAX_REVIVALS:
            return f"{server} is given up after {_MAX_REVIVALS} restarts; last: {reason}"
        server.pending, server.then = self._ask(server, "start"), "attach"
        return message

    def _refuse(self, server: _Watched, reason: str) -> str:
        """Have a server that may not serve forget the run."""
        server.num_revivals = _MAX_REVIVALS + 1
        self._lost(server.name, reason)
        server.pending, server.then = self._ask(server, "detach"), "detach"
        return f"{server} is given up: {reason}"

    def _lose(self, server: _Watched, reason: str) -> str | None:
        """Take its leases back; returns what the user is told of it, None when that was told before."""
        if not server.is_serving:
            return None
        server.is_serving = False
        self._lost(server.name, reason)
        return f"{server} stopped serving ({reason}); its leases went back, it is being started again"

    def _note_silence(self, server: _Watched) -> str | None:
        """Say once that a server does not answer: its link is cut, or its process stands still.

        Nothing is done: the coordinator has its leases out again when its connection is gone, and pushes leave it out.
        """
        silent_s = self._clock() - server.asked_at
        if server.is_silent or server.then != "judge" or silent_s < self._silence_s:
            return None
        server.is_silent = True
        return f"{server} has not answered for {silent_s:.0f} s; the run goes on without it until it does"

    def _ask(self, server: _Watched, what: str) -> Any:
        server.asked_at = self._clock()
        bodies: dict[str, list[Any]] = {"attach": [self._spec.model_dump(mode="json")], "start": [self._files]}
        body = bodies.get(what, [])
        return self._calls.ask(server.name, what, *body)
