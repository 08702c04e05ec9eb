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
        self._watching: set[asyncio.Task[None]] = set()

    @property
    def is_lending(self) -> bool:
        return bool(self._watching)

    def fill(self, num_processes: int) -> None:
        """Have this many wait, none on a cluster with GPUs. Returns at once: they import meanwhile."""
        if not ray.cluster_resources().get("GPU"):
            self._idle += [_start(num_gpus=0) for _ in range(num_processes - len(self._idle))]

    async def lend(self, num_processes: int, num_gpus: int, borrower: Any, strategy: str) -> list[Any]:
        """Return handles of processes that are warm, for as long as `borrower` lives, an actor with `live`."""
        waiting, self._idle = ([], self._idle) if num_gpus else (self._idle[:num_processes], self._idle[num_processes:])
        answers = await asyncio.gather(*(process.is_warm.remote() for process in waiting), return_exceptions=True)
        lent = [process for process, answer in zip(waiting, answers, strict=True) if answer is True]
        lent += [_start(num_gpus, strategy) for _ in range(num_processes - len(lent))]
        watching = asyncio.create_task(self._end_with(borrower, lent))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return lent

    def end(self) -> None:
        """End the processes that wait."""
        while self._idle:
            ray.kill(self._idle.pop())

    async def _end_with(self, borrower: Any, lent: Sequence[Any]) -> None:
        """End what was lent when its borrower is gone, however it went; have as many wait for the next one."""
        with contextlib.suppress(RayError):  # it did not end by itself: all the same to us
            await borrower.live.remote()
        for process in lent:
            ray.kill(process)
        self.fill(len(lent))


def _start(num_gpus: int, strategy: str = "DEFAULT") -> Any:
    options = {
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "max_concurrency": _NUM_CALLS,
        "scheduling_strategy": strategy,
    }
    return ray.remote(StandbyProcess).options(**options).remote(_LEARNER_IMPORTS)
