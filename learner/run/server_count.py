"""More or fewer rollout servers while a run goes on: what an operator wishes is planned, done, and answered.

Polled by the driver; never blocks. A new server is attached by `ServerWatch` and gets the weights with the next push.
One that is taken away is pushed to no more, its samples go back and are leased to others, and then it ends.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from learner.run.server_watch import ServerWatch
from learner.run.topology import Processes
from protocol.errors import NeighbourError, OperatorError
from protocol.node.server_wish import ServerAnswer, ServerWish, answer_wish, read_wish


class FleetCalls(Protocol):
    """How the fleet is asked without waiting for it."""

    def add(self, planned: Processes, nodes: Sequence[str]) -> Any:
        """Return a reference to what the fleet says of new servers, one on each of these nodes."""

    def remove(self, name: str) -> Any:
        """Return a reference to the end of a server."""

    def nodes_of(self, names: Sequence[str]) -> Any:
        """Return a reference to Ray's names of the nodes that these servers are on."""

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
    ) -> None:
        """folder: the run's. plan: returns where so many servers would be, or raises OperatorError saying why not.

        push_to: tells rank 0 to which servers it pushes from now on. release: has a server's samples leased to others.
        """
        self.names = list(names)
        self._folder = folder
        self._watch = watch
        self._fleet = fleet
        self._plan = plan
        self._push_to = push_to
        self._release = release
        known = read_wish(folder)
        self._known = known.id if known is not None else ""  # of an earlier start: that one took it up
        self._wish: ServerWish | None = None
        self._planned: Processes | None = None
        self._pending: dict[str, Any] = {}  # what is asked of the fleet: by a server's name; "": by none
        self._step = ""  # what the answer to "" is for: look, add

    def poll(self) -> list[str]:
        """Take up a wish, or go on with one; returns what the user should be told."""
        if self._wish is None:
            wish = read_wish(self._folder)
            if wish is None or wish.id == self._known:
                return []
            self._known = wish.id
            self._wish = wish
            try:
                return self._begin(wish.change)
            except OperatorError as error:
                return self._refuse(str(error))
        done = {name: each for name, each in self._pending.items() if self._fleet.is_done(each)}
        told: list[str] = []
        for name, reference in done.items():
            del self._pending[name]
            try:
                told += self._advance(name, self._fleet.result(reference))
            except (OperatorError, NeighbourError) as error:
                told += self._refuse(str(error)) if not name else self._advance(name, None)
        return told

    def _begin(self, change: int) -> list[str]:
        number = len(self.names) + change
        if change == 0 or number < 1:
            raise OperatorError(f"The run has {len(self.names)} rollout servers; {change:+d} would leave {number}.")
        if change > 0:
            self._planned = self._plan(number)
            self._pending[""], self._step = self._fleet.nodes_of(self.names), "look"
            self._answer(f"{change} rollout servers are being started.", is_last=False)
            return []
        taken, self.names = self.names[number:], self.names[:number]
        self._push_to(tuple(self.names))
        for name in taken:
            self._watch.forget(name)
            self._pending[name] = self._fleet.remove(name)
        self._answer(f"{', '.join(taken)} is being taken away.", is_last=False)
        return []

    def _advance(self, name: str, result: Any) -> list[str]:
        if name:
            self._release(name, "it was taken from the run")
            return [] if self._pending else self._end(f"Rollout servers were taken away: {len(self.names)} are left.")
        assert self._planned is not None
        assert self._wish is not None
        if self._step == "look":
            # The plan has places for all; those that are free are at least as many as are to be added.
            wanted = Counter(node.node_id for node in self._planned.places)
            nodes = list((wanted - Counter(result)).elements())[: self._wish.change]
            self._pending[""], self._step = self._fleet.add(self._planned, nodes), "add"
            return []
        new = [str(info["name"]) for info in result]
        self.names += new
        self._watch.add(new)
        self._push_to(tuple(self.names))
        return self._end(f"{', '.join(new)} started, and serve from the next push on: {len(self.names)} in all.")

    def _end(self, text: str) -> list[str]:
        self._answer(text, is_last=True)
        self._wish = None
        return [text]

    def _refuse(self, text: str) -> list[str]:
        self._answer(text, is_last=True, is_refused=True)
        self._wish = None
        return [f"The number of rollout servers stays {len(self.names)}. {text}"]

    def _answer(self, text: str, *, is_last: bool, is_refused: bool = False) -> None:
        assert self._wish is not None
        with contextlib.suppress(OSError):  # a full disk: the operator waits in vain, the run goes on
            answer_wish(self._folder, ServerAnswer(id=self._wish.id, text=text, is_last=is_last, is_refused=is_refused))
