"""The bundled mathematics scorer: 1 if the answer equals a target as an expression, else 0; uses math-verify.

The answer is the last `<answer>` of the response, else `\\boxed{..}`, else the last expression. A policy may write
expressions that no computer can evaluate, such as 9^9^9^9. So answers are compared in separate processes with limits on
processor time and memory. An answer that exceeds them is not equal.
"""

import asyncio
import functools
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from rewards.exact_match import last_answer
from rewards.sample import Sample, Score, Scorer, targets_of

_SPAWN_ATTEMPTS = 3


def make_math_scorer(num_processes: int) -> Scorer:
    """Return a scorer that compares at most `num_processes` samples at a time."""
    return functools.partial(_score, MathProcesses(num_processes))


class MathProcesses:
    """Processes that compare answers. Each starts with its first sample, and restarts after a crash."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._idle: asyncio.LifoQueue[Process | None] | None = None
        self._exchanges: set[asyncio.Task[bool | None]] = set()

    async def equal(self, answer: str, targets: Sequence[str]) -> bool | None:
        """Return whether answer equals a target; None if the comparison killed its process."""
        if self._idle is None:
            self._idle = asyncio.LifoQueue()
            for _ in range(self._number):
                self._idle.put_nowait(None)
        process = await self._idle.get()
        # Never cancelled half way: the reply would be read as the next sample's.
        exchange = asyncio.ensure_future(self._exchange(process, answer, targets))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        return await asyncio.shield(exchange)

    async def _exchange(self, process: Process | None, answer: str, targets: Sequence[str]) -> bool | None:
        assert self._idle is not None
        alive: Process | None = None
        try:
            process = process if process is not None and process.returncode is None else await _start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"answer": answer, "targets": list(targets)}).encode() + b"\n")
            reply = await process.stdout.readline()
            if not reply:
                await process.wait()
                return None
            alive = process
            return bool(json.loads(reply))
        finally:
            self._idle.put_nowait(alive)


async def _start() -> Process:
    """Return a ready process. Raises: OSError if none starts."""
    for _ in range(_SPAWN_ATTEMPTS):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rewards.math_process", stdin=PIPE, stdout=PIPE
        )
        assert process.stdout is not None
        if await process.stdout.readline():
            return process
        await process.wait()
    raise OSError("the process that compares answers exits at its start: see the log of this service")


async def _score(processes: MathProcesses, samples: Sequence[Sample]) -> list[Score]:
    """Return 1.0 or 0.0 per sample. Raises: SampleError for a label without a target."""
    targets = [targets_of(sample.label, index) for index, sample in enumerate(samples)]

    async def score(sample: Sample, accepted: Sequence[str]) -> Score:
        answer = last_answer(sample.text)
        is_equal = await processes.equal(sample.text if answer is None else answer, accepted)
        return Score(1.0 if is_equal else 0.0, logs={"math_undecided": 1.0 if is_equal is None else 0.0})

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(score(*each)) for each in zip(samples, targets, strict=True)]
    return [task.result() for task in tasks]
