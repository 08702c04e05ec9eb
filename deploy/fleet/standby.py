"""Processes that are warm before anyone needs them: they hold what is slow to import, and nothing of ours yet.

A run makes its learner ranks of them. Nothing of ours is imported ahead, so that a process which waited for hours runs
the code that is there when it is used.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.fleet.place import Place, this_node
from protocol.ray_calls import OUR_ACTOR

_LEARNER_IMPORTS = (
    "torch",
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
# Its methods may wait for each other: `train` runs for hours, `progress` is asked meanwhile.
_NUM_CALLS = 4


class StandbyProcess:
    """An actor. Call order: become, then invoke."""

    def __init__(self, imports: Sequence[str]) -> None:
        # Read by torch when it first takes memory: pages of 2 MiB for what is large, where the kernel has them. Fresh
        # memory of a push's buckets then costs a quarter of what it costs in pages of 4 KiB.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        for name in imports:
            import_module(name)

    def become(self, class_path: str, environment: Mapping[str, str], *arguments: Any) -> None:
        """Make an object of the class `module:Class`: `invoke` calls its methods from now on.

        environment: variables of the borrower's that this process was started without.
        """
        os.environ.update(environment)
        module, _, name = class_path.partition(":")
        self._object = getattr(import_module(module), name)(*arguments)

    def is_warm(self) -> bool:
        """Return True, once everything is imported."""
        return True

    def invoke(self, method: str, *arguments: Any) -> Any:
        return getattr(self._object, method)(*arguments)


class StandbyPool:
    """The fleet's standby processes, in its event loop. On a cluster with GPUs none is kept: it would hold one."""

    def __init__(self) -> None:
        self._idle: list[Any] = []
        self._borrower: Any = None  # who may borrow, an actor; None: nobody was let in yet
        self._lent: list[Any] = []  # what it has borrowed
        self._watching: asyncio.Task[None] | None = None  # ends when the borrower has, and all that it borrowed

    @property
    def is_lending(self) -> bool:
        """True from the time a borrower is let in until what it borrowed has ended."""
        return self._watching is not None and not self._watching.done()

    async def admit(self, borrower: Any, timeout_s: float) -> bool:
        """Return whether `borrower`, an actor with `live`, may borrow: nobody else does until it has ended.

        Blocks for timeout_s at most, while another one lives.
        """
        if self.is_lending and borrower == self._borrower:
            return True
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=timeout_s)
        if self.is_lending:
            return False
        # Nothing is awaited from the question to here: of two that wait one is let in.
        self._borrower, self._lent = borrower, []
        self._watching = asyncio.create_task(self._end_with(borrower, self._lent))
        return True

    def fill(self, num_processes: int) -> None:
        """Have this many wait on this node, none on a cluster with GPUs. Returns at once: they import meanwhile."""
        if num_processes > len(self._idle) and not ray.cluster_resources().get("GPU"):
            here = Place(this_node(), 0)
            self._idle += [_start(here) for _ in range(num_processes - len(self._idle))]

    async def lend(self, places: Sequence[Place]) -> list[Any]:
        """Return a process for each place, in order, to the borrower that was let in, for as long as it lives.

        Those that wait are lent first, where nothing but a process on this node is asked for.
        """
        here = this_node()
        fitting = [number for number, place in enumerate(places) if place in (Place(here, 0), Place(None, 0))]
        waiting, self._idle = self._idle[: len(fitting)], self._idle[len(fitting) :]
        answers = await asyncio.gather(*(process.is_warm.remote() for process in waiting), return_exceptions=True)
        warm = [process for process, answer in zip(waiting, answers, strict=True) if answer is True]
        lent_at = dict(zip(fitting, warm, strict=False))
        lent = [lent_at[number] if number in lent_at else _start(place) for number, place in enumerate(places)]
        self._lent += lent
        if not self.is_lending:  # the borrower ended meanwhile, and nobody would end these
            _end(lent)
        return lent

    def end(self) -> None:
        """End the processes that wait."""
        while self._idle:
            ray.kill(self._idle.pop())

    async def _end_with(self, borrower: Any, lent: Sequence[Any]) -> None:
        """End what was lent when its borrower is gone, however it went; have as many wait for the next one."""
        with contextlib.suppress(RayError):  # it did not end by itself: all the same to us
            await borrower.live.remote()
        _end(lent)
        self.fill(len(lent))


def _end(lent: Sequence[Any]) -> None:
    for process in lent:
        ray.kill(process)


def _start(place: Place) -> Any:
    options = {**OUR_ACTOR, "max_concurrency": _NUM_CALLS, **place.options()}
    return ray.remote(StandbyProcess).options(**options).remote(_LEARNER_IMPORTS)
