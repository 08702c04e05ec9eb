"""The rollout servers of a running attempt: the present servers are changed until they match the wanted ones.

Wanted: a number of servers, all on nodes that are not drained. Present: one `RunServer` each, with node and state. Each
poll checks every server and then takes one step:

    fewer than wanted on nodes that are not drained     plan, and have the fleet add servers there
    more than wanted, and the others serve              push to them no more, remove them, release their samples
    as many as wanted                                   reply to the operator who changed the number

Servers on a drained node leave after their replacements serve, or without replacements where no node has room and
others serve the run. A new server gets the weights with the first push after it was attached.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from learner.run.server import RunServer, ServerState
from protocol.errors import NeighbourError, OperatorError
from protocol.node.ray_nodes import DrainReport
from protocol.node.scale_request import ScaleReply, ScaleRequest, read_reply, read_request, write_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from learner.cluster.servers import ServerCalls
    from protocol.settings.run_spec import RunSpec

_RETRY_S = 60.0  # room may come that was missing


class RunServers:
    """`drained`: Ray's names of the nodes that servers leave; set it before `poll`."""

    def __init__(
        self,
        infos: Sequence[Mapping[str, Any]],
        spec: RunSpec,
        calls: ServerCalls,
        folder: Path,
        other_index: str = "warn",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """infos: the fleet's descriptions. folder: the run's. other_index: retriever.other_index."""
        self.drained: frozenset[str] = frozenset()
        self.num_wanted = len(infos)
        self._spec = spec
        self._calls = calls
        self._folder = folder
        self._other_index = other_index
        self._digests: dict[str, str] = {}  # digest of each attached server's search index; "": none
        self._clock = clock
        self._servers: list[RunServer] = []
        self._add_servers(infos)
        self._late = {str(info["name"]) for info in infos if not info["is_started"]}
        self._pushed_to: tuple[str, ...] = self.ready_names
        self._changes: list[tuple[str, Any]] = []  # calls to the fleet under way: (removed server or "", reference)
        self._request: ScaleRequest | None = None  # the operator's request that is being carried out
        self._last_request = self._refuse_old_request()  # id of the last request that was read
        self._stuck = ""  # why servers stay on a drained node
        self._retry_at = 0.0  # seconds of the clock
        self._tried: frozenset[str] = frozenset()  # drained nodes at the last try

    @property
    def names(self) -> list[str]:
        """The run's servers without those that are being removed."""
        return [server.name for server in self._present]

    @property
    def ready_names(self) -> tuple[str, ...]:
        """The servers whose engines ran when the attempt began."""
        return tuple(name for name in self.names if name not in self._late)

    @property
    def late_names(self) -> list[str]:
        """The servers whose engines start while the run trains."""
        return sorted(self._late)

    @property
    def may_serve(self) -> bool:
        """False when no server serves and none may serve later; True for a run without servers."""
        return not self._servers or any(server.may_serve for server in self._present)

    def note_attached(self, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Note that servers are attached; return messages. Raises: OperatorError when their indexes differ."""
        messages = self._check(runs)
        for server in self._servers:
            if server.name in runs:
                server.begin_serving()
        return messages

    def poll(self, *, may_start: bool = True) -> list[str]:
        """Check the servers and take the next step; return messages for the user.

        may_start: False while servers of a shared device must not start.
        """
        messages = [message for server in self._present for message in server.poll()] if may_start else []
        messages += self._take_request()
        messages += self._finish_changes()
        if not self._changes:
            messages += self._take_step()
        pushed_to = tuple(server.name for server in self._present if not server.is_new)
        if pushed_to != self._pushed_to:
            self._pushed_to = pushed_to
            self._calls.push_to(pushed_to)
        return messages

    def drain_report(self, node_id: str) -> DrainReport:
        """Return whether servers of the run are still on a drained node, as a report for `drain`."""
        there = [server.name for server in self._servers if server.node_id == node_id]
        if there and self._stuck:
            return DrainReport(text=self._stuck, is_stuck=True)
        if there:
            return DrainReport(text=f"{', '.join(there)} leaves the drained node.")
        if unknown := [server.name for server in self._servers if not server.node_id]:
            return DrainReport(text=f"{', '.join(unknown)} does not answer, and may be there.")
        return DrainReport(text="No rollout server of the run is there.", is_over=True)

    @property
    def _present(self) -> list[RunServer]:
        return [server for server in self._servers if server.state is not ServerState.LEAVING]

    def _add_servers(self, infos: Sequence[Mapping[str, Any]]) -> None:
        for info in infos:
            server = RunServer(str(info["name"]), self._spec, self._calls, self._check, self._clock)
            server.node_id = str(info.get("node_id") or "")
            self._servers.append(server)

    def _check(self, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return messages about servers that are attached. Raises: OperatorError when they must not serve."""
        digests = self._digests | {name: run.get("content_hash", "") for name, run in runs.items()}
        warning = compare_indexes(digests, self._other_index)
        self._digests = digests
        messages = [f"{name}: agents generate at {run['base_url']}" for name, run in runs.items() if "base_url" in run]
        return messages + ([warning] if warning is not None else [])

    def _take_request(self) -> list[str]:
        request = read_request(self._folder)
        if request is None or request.id == self._last_request:
            return []
        self._last_request = request.id
        number, before = self.num_wanted + request.change, len(self.names)
        try:
            if request.change == 0 or number < 1:
                raise OperatorError(f"The run has {before} rollout servers; {request.change:+d} would leave {number}.")
            if request.change > 0:
                self._calls.plan(number)
        except OperatorError as error:
            self._reply(request, str(error), is_last=True, is_refused=True)
            return [f"The number of rollout servers stays {before}. {error}"]
        self.num_wanted, self._request, self._retry_at = number, request, 0.0
        self._reply(request, f"Changing from {before} to {number} rollout servers.", is_last=False)
        return []

    def _finish_changes(self) -> list[str]:
        """Take the fleet's answers; return messages."""
        done = [change for change in self._changes if self._calls.is_done(change[1])]
        self._changes = [change for change in self._changes if change not in done]
        messages, removed = [], []
        for name, reference in done:
            try:
                answer = self._calls.result(reference, "the fleet")
            except (OperatorError, NeighbourError) as error:
                if not name:
                    messages += self._give_up_adding(str(error))
            else:
                if not name:
                    self._add_servers(answer)
                    new = ", ".join(str(info["name"]) for info in answer)
                    messages.append(f"{new} started: the run has {len(self.names)} rollout servers")
            if name:  # a server that died while it was removed is gone too
                self._servers = [server for server in self._servers if server.name != name]
                self._calls.release(name, "it was removed from the run")
                removed.append(name)
        if removed:
            messages.append(f"{', '.join(removed)} removed: the run has {len(self.names)} rollout servers")
        return messages

    def _take_step(self) -> list[str]:
        leaving = [server for server in self._present if server.node_id in self.drained]
        if not leaving or self.drained != self._tried:
            self._stuck, self._retry_at = "", 0.0
        self._tried = self.drained
        surplus = len(self._present) - self.num_wanted
        missing = self.num_wanted - (len(self._present) - len(leaving))
        if surplus > 0:
            return self._remove(surplus, leaving)
        if missing > 0:
            return self._add(missing, leaving) if self._clock() >= self._retry_at else []
        if self._request is not None:
            self._reply(self._request, f"The run has {self.num_wanted} rollout servers.", is_last=True)
            self._request = None
        return []

    def _remove(self, number: int, leaving: Sequence[RunServer]) -> list[str]:
        """Remove the servers that the run needs least, once enough others serve."""
        newest_first = list(reversed(self._present))
        removed = sorted(newest_first, key=lambda server: (server.may_serve, server not in leaving, server.is_serving))
        removed, kept = removed[:number], removed[number:]
        if any(server in leaving for server in removed) and not self._can_serve(kept):
            return []
        failed = [f"{server} did not come to serve" for server in removed if server.is_new and not server.may_serve]
        for server in removed:
            server.state = ServerState.LEAVING
            self._changes.append((server.name, self._calls.remove(server.name)))
        return failed

    def _can_serve(self, servers: Sequence[RunServer]) -> bool:
        """Return whether the run can do with these servers: none is still starting, and one serves if any does."""
        if any(server.is_new and server.may_serve for server in servers):
            return False
        return any(server.is_serving for server in servers) or not any(server.is_serving for server in self._present)

    def _add(self, missing: int, leaving: Sequence[RunServer]) -> list[str]:
        """Have the fleet start as many servers as the plan has free places for on nodes that are not drained."""
        staying = [server for server in self._present if server not in leaving]
        reason = "No other node has room."
        for number in range(self.num_wanted, self.num_wanted - missing, -1):
            try:
                planned = self._calls.plan(number)
            except OperatorError as error:
                reason = str(error)
                continue
            places = Counter(node.node_id for node in planned.places)
            free = list((places - Counter(server.node_id for server in staying)).elements())
            if nodes := free[: number - len(staying)]:
                self._changes.append(("", self._calls.add(planned, nodes)))
                return [f"{', '.join(map(str, leaving))} leaves a drained node; others start first."] if leaving else []
        return self._give_up_adding(reason)

    def _give_up_adding(self, reason: str) -> list[str]:
        """Want fewer servers, or keep those on drained nodes for now; return messages."""
        leaving = [server for server in self._present if server.node_id in self.drained]
        staying = [server for server in self._present if server not in leaving]
        if self._request is not None and self.num_wanted > len(self._present):
            self.num_wanted = len(self._present)
            self._reply(self._request, reason, is_last=True, is_refused=True)
            self._request = None
            return [f"The number of rollout servers stays {self.num_wanted}. {reason}"]
        if leaving and staying and self._can_serve(staying):
            self.num_wanted = len(staying)
            return [f"{', '.join(map(str, leaving))} leaves a drained node without a replacement. {reason}"]
        text = f"Rollout servers stay on a drained node: the run needs them. {reason}"
        is_new, self._stuck, self._retry_at = text != self._stuck, text, self._clock() + _RETRY_S
        return [text] if is_new else []

    def _refuse_old_request(self) -> str:
        """Refuse a request that an earlier attempt did not finish; return the id of the newest request, or ""."""
        if (request := read_request(self._folder)) is None:
            return ""
        reply = read_reply(self._folder)
        if reply is None or reply.id != request.id or not reply.is_last:
            text = f"The run restarted with {len(self.names)} rollout servers. Give the command again."
            self._reply(request, text, is_last=True, is_refused=True)
        return request.id

    def _reply(self, request: ScaleRequest, text: str, *, is_last: bool, is_refused: bool = False) -> None:
        with contextlib.suppress(OSError):  # the disk is full: the operator's command times out, the run continues
            write_reply(self._folder, ScaleReply(id=request.id, text=text, is_last=is_last, is_refused=is_refused))


def compare_indexes(digests: Mapping[str, str], other_index: str) -> str | None:
    """Return a warning when servers search different indexes: the policy's texts must not depend on its server.

    digests: of each server's index; "" where it has none or its retriever reports none.
    Raises: OperatorError instead of the warning with other_index = refuse.
    """
    known = {server: digest for server, digest in digests.items() if digest}
    if len(set(known.values())) < 2:
        return None
    each = ", ".join(f"{server} searches {digest[:12]}" for server, digest in sorted(known.items()))
    text = (
        f"Rollout servers search different indexes: {each}. The policy's texts depend on its server. Build one "
        "index on every node from the same corpus with the same options, or set retriever.url."
    )
    if other_index == "refuse":
        raise OperatorError(f"{text} With retriever.other_index = warn the run continues.")
    return text
