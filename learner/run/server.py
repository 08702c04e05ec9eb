"""One rollout server of a run: checked every few seconds, and after a restart started and attached again.

answer of `describe`                         next call
it serves this attempt of the run            describe
it restarted, or serves another attempt      start its engine, then attach it to the run
its process is away                          describe, until Ray has restarted it on a node with room
five failed restarts, or another index       describe; it is not started again
"""

import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from learner.cluster.servers import ServerCalls
from protocol.errors import AwayError, NeighbourError, OperatorError
from protocol.settings.run_spec import RunSpec

_LOOPBACK = "127.0.0.1"
_MAX_RESTARTS = 5  # in a row: a server that has served for a minute counts as well again
_WELL_AFTER_S = 60.0
# Its node is gone and no other has room; a node may join meanwhile.
_AWAY_S = 600.0
SILENCE_S = 30.0


class ServerState(Enum):
    """What a run knows of a server."""

    STARTING = "starting"  # added or restarted; it does not serve the run yet
    SERVING = "serving"  # attached to this attempt of the run
    AWAY = "away"  # Ray has no process of it at the moment
    FAILED = "failed"  # it is not started again


class RunServer:
    """Call `poll` every few seconds; it never blocks."""

    def __init__(
        self,
        name: str,
        spec: RunSpec,
        calls: ServerCalls,
        check: Callable[[Mapping[str, Mapping[str, Any]]], list[str]],
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = SILENCE_S,
    ) -> None:
        """check: takes an attached server's answer by its name and returns messages; raises OperatorError when it must
        not serve. clock: in seconds. silence_s: longest wait for an answer before the user gets a message.
        """
        self.name = name
        self.state = ServerState.STARTING
        self.is_new = True  # it has not served this attempt yet, so no weights are pushed to it
        self._node_ip = _LOOPBACK  # loopback: the cluster is this machine alone
        self._spec = spec
        self._calls = calls
        self._check = check
        self._clock = clock
        self._silence_s = silence_s
        self._since = clock()  # seconds of the clock: begin of the state
        self._num_restarts = 0  # since it last served for a minute
        self._call: Any = None  # call under way
        self._method = ""  # method of that call
        self._asked_at = 0.0  # seconds of the clock
        self._is_refused = False  # True: `check` refused it, so it must never serve this run
        self._is_silent = False  # True: the user knows that it does not answer
        self.place: tuple[str, list[str]] | None = None  # node and GPUs that its ranks share; None: it shares none

    def __str__(self) -> str:
        return self.name if self._node_ip == _LOOPBACK else f"{self.name} on node {self._node_ip}"

    @property
    def is_serving(self) -> bool:
        return self.state is ServerState.SERVING

    @property
    def may_serve(self) -> bool:
        """True when it serves or may serve later."""
        if self.state is ServerState.AWAY:
            return self._clock() - self._since <= _AWAY_S
        return self.state is not ServerState.FAILED

    def begin_serving(self) -> None:
        """Note that it is attached to the run."""
        self._change_to(ServerState.SERVING)
        self.is_new = False

    def poll(self) -> list[str]:
        """Take the answer of the last call and make the next one; return messages for the user.

        Raises: NeighbourError when Ray restarted it away from the ranks that share its GPUs.
        """
        if self._call is None:
            self._ask("describe")
            return []
        if not self._calls.is_done(self._call):
            return self._note_silence()
        self._is_silent = False
        reference, self._call = self._call, None
        try:
            answer = self._calls.result(reference, self.name)
        except AwayError as error:
            return self._await_process(str(error))
        except (NeighbourError, OperatorError) as error:
            return self._restart(str(error))
        if self._method == "describe":
            self._node_ip = answer.get("node_ip", self._node_ip)
            self._check_place(answer)
            return self._judge(answer["run"])
        if self._method == "start":
            self._ask("attach", self._spec.model_dump(mode="json"))
        elif self._method == "attach":
            return self._finish_attaching(answer["run"])
        return []

    def _check_place(self, answer: Mapping[str, Any]) -> None:
        if self.place is not None and (answer["node_id"], answer["cards"]) != self.place:
            cards, earlier = (", ".join(each) for each in (answer["cards"], self.place[1]))
            raise NeighbourError(
                str(self), f"was restarted on GPU {cards}, and its ranks share GPU {earlier} of its earlier place"
            )

    def _judge(self, run: Mapping[str, Any] | None) -> list[str]:
        if self.state is ServerState.AWAY:
            return self._restart("it was away")
        is_ours = run is not None and run["run_id"] == self._spec.run_id
        if run is not None and is_ours and run["incarnation"] == self._spec.incarnation and run["ended"] is None:
            if self._is_refused:  # the call to detach it failed
                self._ask("detach")
            elif not self.is_serving:
                self.begin_serving()
            elif self._clock() - self._since > _WELL_AFTER_S:
                self._num_restarts = 0
            return []
        if run is None:
            return self._restart("it was restarted")
        if not is_ours:
            return self._restart(f"it serves another run, {run['run_id']}")
        if run["ended"] is None:
            return self._restart("it serves another start of this run")
        return self._restart(f"its session ended: {run['ended']}")

    def _finish_attaching(self, run: Mapping[str, Any]) -> list[str]:
        try:
            messages = self._check({self.name: run})
        except OperatorError as error:
            self._change_to(ServerState.FAILED)
            self._is_refused = True
            self._calls.lose(self.name, str(error))
            self._ask("detach")
            return [f"{self} failed: {error}"]
        again = "" if self.is_new else " again"
        self.begin_serving()
        return [*messages, f"{self} serves{again}, from the next push on"]

    def _await_process(self, reason: str) -> list[str]:
        """Take its leases back and ask until Ray has a process: a call without a process is not a failed start."""
        messages = self._lose(reason)
        if self.state not in (ServerState.AWAY, ServerState.FAILED):
            self._change_to(ServerState.AWAY)
        self._ask("describe")
        return messages

    def _restart(self, reason: str) -> list[str]:
        """Take its leases back and start its engine; Ray has restarted the process."""
        if self.state is ServerState.FAILED:
            return []
        messages = self._lose(reason)
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            self._change_to(ServerState.FAILED)
            return [f"{self} failed after {_MAX_RESTARTS} restarts; last: {reason}"]
        self._change_to(ServerState.STARTING)
        self._ask("start")
        return messages

    def _lose(self, reason: str) -> list[str]:
        """Take its leases back, once; return the message for the user."""
        if not self.is_serving:
            return []
        self._calls.lose(self.name, reason)
        self._change_to(ServerState.STARTING)
        return [f"{self} stopped serving ({reason}); its leases went back, and it is started again"]

    def _note_silence(self) -> list[str]:
        """Report once that a server does not answer: its link is cut, or its process hangs.

        The coordinator takes its leases back when its connection ends, and pushes leave it out.
        """
        silent_s = self._clock() - self._asked_at
        if self._is_silent or self._method != "describe" or silent_s < self._silence_s:
            return []
        self._is_silent = True
        return [f"{self} has not answered for {silent_s:.0f} s; the run continues without it until it does"]

    def _ask(self, method: str, *arguments: Any) -> None:
        self._asked_at, self._method = self._clock(), method
        self._call = self._calls.ask(self.name, method, *arguments)

    def _change_to(self, state: ServerState) -> None:
        self.state, self._since = state, self._clock()
