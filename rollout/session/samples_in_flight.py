"""The samples that a run has in flight here: leases that wait for room, and one task for each sample being made.

What a task makes, a trajectory or which neighbour failed it, goes into the outbox.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from protocol.errors import NeighbourError
from protocol.one_line import describe_error, one_line
from protocol.settings.rollout import RolloutSettings
from protocol.wire import messages as m
from rollout.environments.base import Task
from rollout.environments.guard import ENVIRONMENT
from rollout.episodes.sample import AGENT, Player, SampleTask, WrittenSoFar
from rollout.session.outbox import Failure, FailureCounts, Finished, Item, Key, Outbox
from rollout.session.turns_to_keep import TurnsToKeep, interrupted_samples

_NUM_REMEMBERED = 65536


class SamplesInFlight:
    """At most `max_groups_in_flight` groups are made at a time; leases beyond that wait."""

    def __init__(
        self,
        player: Player,
        outbox: Outbox,
        failures: FailureCounts,
        settings: RolloutSettings,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        has_engine: Callable[[], bool] = lambda: True,
    ) -> None:
        """on_change: called when a sample has ended, which makes room and mostly news.

        has_engine: whether the engine is there. Without it no sample can be made here, and none is at fault: this
        process ends within a second, and whoever gave the leases out takes them back from a server that died.
        """
        self._player = player
        self._outbox = outbox
        self._failures = failures
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._has_engine = has_engine
        self.turns = TurnsToKeep(clock, on_change)
        self._leases: deque[m.Lease] = deque()
        self._running: dict[tuple[str, int], _Running] = {}
        self._open_groups: Counter[str] = Counter()
        self._newest: dict[str, tuple[int, int]] = {}

    @property
    def num_groups(self) -> int:
        """Groups here: with a sample in flight, or waiting for room."""
        return len(self._open_groups) + len(self._leases)

    @property
    def num_samples(self) -> int:
        """Samples in flight."""
        return len(self._running)

    @property
    def room(self) -> int:
        """How many more groups could come."""
        if not self._has_engine():
            return 0
        return max(0, self._settings.max_groups_in_flight - self.num_groups)

    def unfinished(self) -> dict[str, int]:
        """Return each group here whose samples the coordinator does not have all, with its newest lease's attempt."""
        names = {lease.group for lease in self._leases} | self._open_groups.keys()
        names |= {key.group for key in self._outbox.unanswered()}
        return {name: self._newest[name][1] for name in names if name in self._newest}

    def add(self, lease: m.Lease, buffers: Sequence[bytes] = ()) -> None:
        """Queue a lease; `admit` starts it. One that came before is of no use, even if its samples left long ago.

        buffers: arrays of its samples that other servers had begun. Raises: FrameError when they are of other lengths.
        """
        interrupted = interrupted_samples(lease, buffers)
        stamp = (lease.incarnation, lease.attempt)
        if self._newest.get(lease.group, (0, 0)) >= stamp:
            return
        # Newest last: what is forgotten first was leased longest ago.
        self._newest.pop(lease.group, None)
        self._newest[lease.group] = stamp
        if len(self._newest) > _NUM_REMEMBERED:
            del self._newest[next(iter(self._newest))]
        self._leases.append(lease)
        self.turns.interrupted.update(interrupted)

    def cancel(self) -> None:
        """Stop every sample in flight."""
        for running in self._running.values():
            running.task.cancel()

    def admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start leases while there is room. More than were asked for can come: a Demand and a Lease may cross."""
        while self._leases and len(self._open_groups) < self._settings.max_groups_in_flight:
            lease = self._leases.popleft()
            row = msgspec.msgpack.encode((lease.prompt, lease.label, lease.columns))
            for index in lease.sample_indices:
                self._start(tasks, _sample(lease, index, row))

    def stop(self, group: str, sample_index: int, attempt: int) -> None:
        """Stop a try at a sample that another server makes by now: what its tools do from here on, they do twice."""
        running = self._running.get((group, sample_index))
        if running is not None and running.attempt == attempt:
            running.task.cancel()

    def _start(self, tasks: asyncio.TaskGroup, sample: SampleTask) -> None:
        """Start a sample, in place of an older attempt at it; nothing when this very attempt is known."""
        place = (sample.group, sample.sample_index)
        if _key(sample) in self._outbox:
            return
        if (older := self._running.get(place)) is not None:
            older.task.cancel()
        self._open_groups[sample.group] += 1
        task = tasks.create_task(self._make(sample), name=sample.key)
        self._running[place] = _Running(sample.attempt, task)
        # Not a `finally` in the task: a task that is cancelled before its first turn never enters its body.
        task.add_done_callback(lambda _: self._leave(sample))

    async def _make(self, sample: SampleTask) -> None:
        self._outbox.put(await self._played(sample))

    async def _played(self, sample: SampleTask) -> Item:
        """Return the finished sample, or what failed it: whatever is raised in here is this one sample's failure."""
        limit_s, written = self._settings.lease_timeout_s, WrittenSoFar()
        if self._settings.resume_turns:
            written.listener = self.turns.keeper_of(sample)
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return Finished(_key(sample), await self._player.play(sample, written))
        except BaseException as error:
            if _is_told_to_stop(error):
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                late = f"{sample.key} was not made within rollout.lease_timeout_s = {limit_s:g} s"
                error = NeighbourError("lease", late)
            failure = self._failed(sample, error, written)
            if not self._has_engine():
                # Told as the sample's failure, its prompt would come back here at once and fail twice more within
                # milliseconds: it would be given up, and with it all that this server was leased.
                await asyncio.Event().wait()
            return failure

    def _failed(self, sample: SampleTask, error: BaseException, written: WrittenSoFar) -> Failure:
        """Count and log a failure. Code that raised here is logged with its traceback, a neighbour's failure is not."""
        if isinstance(error, NeighbourError):
            boundary, detail = one_line(error.boundary, 200) or "unnamed", one_line(error.detail, 2000)
            raised = error.__cause__ if boundary in (ENVIRONMENT, AGENT) else None
        else:
            boundary, detail, raised = "sample", describe_error(error), error
        self._failures.add(boundary, detail, "the sample's lease went back", self._clock(), raised)
        return Failure(_key(sample), boundary, detail, written.num_model_tokens)

    def _leave(self, sample: SampleTask) -> None:
        """Give a sample's room back."""
        place = (sample.group, sample.sample_index)
        running = self._running.get(place)
        if running is not None and running.attempt == sample.attempt:
            del self._running[place]
            self.turns.forget(place)
        self._open_groups[sample.group] -= 1
        if not self._open_groups[sample.group]:
            del self._open_groups[sample.group]
        self._on_change()


@dataclass
class _Running:
    """A sample in flight."""

    attempt: int
    task: asyncio.Task[None]


def _key(sample: SampleTask) -> Key:
    return Key(sample.group, sample.sample_index, sample.incarnation, sample.attempt)


def _is_told_to_stop(error: BaseException) -> bool:
    """Return whether an exception is this task's own cancelling, rather than one that something in it raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _sample(lease: m.Lease, index: int, row: bytes) -> SampleTask:
    """Return one sample of a lease. row: its prompt, label and columns."""
    # Of its own: an environment that changes its row must not change the row of the group's other samples.
    prompt, label, columns = msgspec.msgpack.decode(row)
    task = Task(prompt, label, columns, is_greedy=index in lease.greedy_indices)
    temperature = None if lease.temperature is msgspec.UNSET else lease.temperature
    return SampleTask(lease.group, index, lease.attempt, lease.incarnation, lease.kind, lease.seed, task, temperature)
