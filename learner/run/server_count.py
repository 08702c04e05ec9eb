"""More or fewer servers while a run goes on, and servers that leave drained nodes: planned, done, and told.

Polled by the driver; never blocks. A new server is attached by `ServerWatch` and gets the weights with the next push.
One that is taken away is pushed to no more, its samples go back and are leased to others, and then it ends.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal, Protocol

from learner.plan.processes import Processes
from learner.run.server_watch import ServerWatch
from protocol.errors import NeighbourError, OperatorError
from protocol.node.drained import Leaving
from protocol.node.server_wish import ServerAnswer, ServerWish, answer_wish, read_answer, read_wish

# Servers that Ray restarts may come to a drained node, and room may come that was missing.
_LOOK_EVERY_S = 10.0
_TRY_AGAIN_S = 60.0
_NONE_THERE = "No rollout server of the run is there."
# look: where the servers are is asked. add: new ones start. attach: those are told of the run. take: old ones end.
_Step = Literal["", "look", "add", "attach", "take"]


class FleetCalls(Protocol):
    """How the fleet is asked without waiting for it."""

    def add(self, planned: Processes, nodes: Sequence[str]) -> Any:
        """Return a reference to what the fleet says of new servers, one on each of these nodes."""

    def remove(self, name: str) -> Any:
        """Return a reference to the end of a server."""

    def describe(self) -> Any:
        """Return a reference to what the fleet says of every server: its `name`, and `node_id` where it answers."""

    def is_done(self, reference: Any) -> bool:
        """Return whether the answer, or the failure, is there."""

    def result(self, reference: Any) -> Any:
        """Return the answer. Raises: what the fleet raised; NeighbourError when it died."""


class ServerCount:
    """`names`: the run's servers, in the fleet's order."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        watch: ServerWatch,
        fleet: FleetCalls,
        plan: Callable[[int], Processes],
        push_to: Callable[[tuple[str, ...]], None],
        release: Callable[[str, str], None],
        drained: Callable[[], AbstractSet[str]] = frozenset,
        say: Callable[[str, Leaving], None] = lambda node, word: None,
        clock: Callable[[], float] = time.monotonic,
        late: Sequence[str] = (),
    ) -> None:
        """folder: the run's. plan: returns where so many servers would be, or raises OperatorError saying why not.

        push_to: tells rank 0 to which servers it pushes from now on. release: has a server's samples leased to others.
        drained: returns Ray's names of the nodes that servers are to leave. say: what becomes of such a node.
        late: which of the servers are still being started: they are pushed to once they serve.
        """
        self.names = list(names)
        self._late = list(late)
        self._folder = folder
        self._watch = watch
        self._fleet = fleet
        self._plan = plan
        self._tell_rank = push_to
        self._release = release
        self._drained = drained
        self._say = say
        self._clock = clock
        self._known = self._give_up_wish()
        self._waiting = ""  # the wish that was told that it is next
        self._wish: ServerWish | None = None  # None while a step is under way: servers leave drained nodes
        self._planned: Processes | None = None
        self._pending: dict[str, Any] = {}  # what is asked of the fleet: by a server's name; "": by none
        self._step: _Step = ""
        self._leaving: list[str] = []  # servers on drained nodes
        self._new: list[str] = []  # those that take over from them
        self._looked_for: AbstractSet[str] = frozenset()  # drained nodes at the last look
        self._look_at = 0.0  # seconds of the clock
        self._told = ""  # why servers could not leave, when that was told last

    def _give_up_wish(self) -> str:
        """Return the wish that is there already, "" where none is. Who still waits for it hears that it is over: an
        earlier start of the run had taken it up, or it came while this one was under way.
        """
        if (wish := read_wish(self._folder)) is None:
            return ""
        answer = read_answer(self._folder)
        if answer is None or answer.id != wish.id or not answer.is_last:
            text = f"The run has begun again meanwhile, with {len(self.names)} rollout servers. Give the command again."
            self._answer_to(wish, text, is_last=True, is_refused=True)
        return wish.id

    def poll(self) -> list[str]:
        """Take up a wish, have servers leave drained nodes, or go on; returns what the user should be told."""
        self._push_to_late()
        if not self._step:
            return self._begin_next()
        self._have_next_wait()
        done = {name: each for name, each in self._pending.items() if self._fleet.is_done(each)}
        told: list[str] = []
        for name, reference in done.items():
            del self._pending[name]
            try:
                told += self._advance(name, self._fleet.result(reference))
            except (OperatorError, NeighbourError) as error:
                told += self._advance(name, None) if name else self._fail(str(error))
        if self._step == "attach" and self._watch.are_serving(self._new):
            self._take(self._leaving)
        elif self._step == "attach" and not self._watch.are_hopeful(self._new):
            self._take(self._new)
            told.append(f"{', '.join(self._new)} did not come to serve: what was to leave stays for now.")
        return told

    def _push_to_late(self) -> None:
        """Have those be pushed to that serve by now: a push would wait for a process that is not there yet."""
        if came := [name for name in self._late if self._watch.are_serving([name])]:
            self._late = [name for name in self._late if name not in came]
            self._push()

    def _push(self) -> None:
        """Have rank 0 push to the servers as they are now."""
        self._tell_rank(tuple(name for name in self.names if name not in self._late))

    def _begin_next(self) -> list[str]:
        wish = read_wish(self._folder)
        if wish is not None and wish.id != self._known:
            self._known = wish.id
            self._wish = wish
            try:
                self._begin(wish.change)
            except OperatorError as error:
                return self._fail(str(error))
        elif (drained := self._drained()) and (drained != self._looked_for or self._clock() >= self._look_at):
            self._looked_for = drained
            self._look()
        return []

    def _have_next_wait(self) -> None:
        """Tell an operator, whose wish came while something else is under way, that it is next."""
        wish = read_wish(self._folder)
        if wish is None or wish.id in (self._known, self._waiting):
            return
        self._waiting = wish.id
        what = "servers are leaving a drained node" if self._wish is None else "another change is under way"
        self._answer_to(wish, f"The run is told, and begins with it once that is done: {what}.", is_last=False)

    def _begin(self, change: int) -> None:
        number = len(self.names) + change
        if change == 0 or number < 1:
            raise OperatorError(f"The run has {len(self.names)} rollout servers; {change:+d} would leave {number}.")
        if change > 0:
            self._planned = self._plan(number)
            self._look()
            self._answer(f"Rollout servers are being started: {change}.", is_last=False)
            return
        taken = self._least_needed(-change)
        self._take(taken)
        self._answer(f"{', '.join(taken)} is being taken away.", is_last=False)

    def _least_needed(self, number: int) -> list[str]:
        """Return so many servers that the run misses least: those that do not serve it now before the newest."""
        newest_last = sorted(self.names, key=lambda name: not self._watch.are_serving([name]))
        return newest_last[-number:]

    def _is_served_without(self, leaving: Sequence[str]) -> bool:
        """Return whether the run does without these: others serve it, or there are others and nobody serves it."""
        serving = {name for name in self.names if self._watch.are_serving([name])}
        return bool(serving - set(leaving)) or (not serving and len(leaving) < len(self.names))

    def _look(self) -> None:
        self._pending[""], self._step = self._fleet.describe(), "look"
        self._look_at = self._clock() + _LOOK_EVERY_S

    def _take(self, names: Sequence[str]) -> None:
        self.names = [name for name in self.names if name not in names]
        self._late = [name for name in self._late if name not in names]
        self._push()
        self._step = "take"
        for name in names:
            self._watch.forget(name)
            self._pending[name] = self._fleet.remove(name)

    def _advance(self, name: str, result: Any) -> list[str]:
        if name:
            self._release(name, "it was taken from the run")
            return [] if self._pending else self._end(f"Rollout servers were taken away: {len(self.names)} are left.")
        if self._step == "look":
            where = {str(server["name"]): str(server["node_id"]) for server in result if server.get("node_id")}
            if self._wish is None:
                return self._leave(where)
            assert self._planned is not None
            self._start(self._planned, where, self.names, self._wish.change)
            return []
        new = [str(info["name"]) for info in result]
        self.names += new
        self._watch.add(new)
        self._push()
        text = f"{', '.join(new)} started, and serve from the next push on: {len(self.names)} in all."
        if self._wish is not None:
            return self._end(text)
        self._new, self._step = new, "attach"
        return [text]

    def _leave(self, where: Mapping[str, str]) -> list[str]:
        """Have servers start beside those that are to leave, as many as have room; at the least one serves the run."""
        drained = self._drained()
        self._leaving = [name for name in self.names if where.get(name) in drained]
        staying = [name for name in self.names if name not in self._leaving]
        if not self._leaving:
            self._step, self._told = "", ""
            silent = [name for name in self.names if name not in where]
            text = f"{', '.join(silent)} does not answer, and may be there." if silent else _NONE_THERE
            self._say_of(drained, Leaving(text=text, is_over=not silent))
            return []
        text = f"{', '.join(self._leaving)} leaves what is drained"
        self._say_of(drained, Leaving(text=f"{text}."))
        why = "No other node has room."
        for number in range(len(self.names), len(staying), -1):
            try:
                if self._start(self._plan(number), where, staying, number - len(staying)):
                    return [f"{text}; others start first."]
            except OperatorError as error:
                why = str(error)
        if not self._is_served_without(self._leaving):
            return self._fail(f"No other node has room for a rollout server, and the run needs one. {why}")
        self._take(self._leaving)
        return [f"{text} without another in its place. {why}"]

    def _start(self, planned: Processes, where: Mapping[str, str], beside: Sequence[str], number: int) -> bool:
        """Ask for so many servers where the plan has room beside these; returns whether it has any."""
        # The plan has places for all; those that are free are at least as many as are to be added.
        wanted = Counter(node.node_id for node in planned.places)
        taken = Counter(where[name] for name in beside if name in where)
        if nodes := list((wanted - taken).elements())[:number]:
            self._pending[""], self._step = self._fleet.add(planned, nodes), "add"
        return bool(nodes)

    def _end(self, text: str) -> list[str]:
        self._answer(text, is_last=True)
        self._wish, self._step = None, ""
        self._looked_for = frozenset()  # drained nodes are looked at again, at once
        return [text]

    def _fail(self, text: str) -> list[str]:
        if self._wish is None:
            return self._stay(text)
        self._answer(text, is_last=True, is_refused=True)
        self._wish, self._step = None, ""
        return [f"The number of rollout servers stays {len(self.names)}. {text}"]

    def _stay(self, text: str) -> list[str]:
        """Servers cannot leave by others that start; where some serve elsewhere, they leave all the same."""
        if self._step == "add" and self._is_served_without(self._leaving):
            self._take(self._leaving)
            return [f"{', '.join(self._leaving)} leaves without another in its place. {text}"]
        self._step, self._look_at = "", self._clock() + _TRY_AGAIN_S
        self._say_of(self._drained(), Leaving(text=text, is_stuck=True))
        is_new, self._told = text != self._told, text
        return [f"Rollout servers stay on a drained node. {text}"] if is_new else []

    def _say_of(self, nodes: AbstractSet[str], word: Leaving) -> None:
        for node in nodes:
            self._say(node, word)

    def _answer(self, text: str, *, is_last: bool, is_refused: bool = False) -> None:
        if self._wish is not None:
            self._answer_to(self._wish, text, is_last=is_last, is_refused=is_refused)

    def _answer_to(self, wish: ServerWish, text: str, *, is_last: bool, is_refused: bool = False) -> None:
        with contextlib.suppress(OSError):  # a full disk: the operator waits in vain, the run goes on
            answer_wish(self._folder, ServerAnswer(id=wish.id, text=text, is_last=is_last, is_refused=is_refused))
