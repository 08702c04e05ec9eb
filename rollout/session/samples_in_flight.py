"""A run's samples in flight on this server: leases that wait for room, and one task per sample.

A task puts its result, a trajectory or a failure, into the outbox. Optional features follow the samples as attachments.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from protocol.contained_tasks import is_own_cancellation
from protocol.errors import NeighbourError
from protocol.one_line import describe_error, one_line, place_of
from protocol.settings.rollout import RolloutSettings
from protocol.wire import messages as m
from rollout.environments.base import Task
from rollout.environments.guard import ENVIRONMENT
from rollout.episodes.conversation import AGENT, Player, SampleTask, TurnListener, WrittenSoFar
from rollout.session.outbox import Failure, FailureCounts, FinishedSample, Item, Key, Outbox

_MAX_GROUPS_REMEMBERED = 65536
DEFAULT_RUNNING = 256  # samples at a time of an engine that does not say its limit


class SampleAttachment(Protocol):
    """An optional feature of a session that follows its samples."""

    def on_lease(self, lease: m.Lease, buffers: Sequence[bytes]) -> None:
        """Called with each new lease. Raises: FrameError for inconsistent buffers."""

    def on_start(self, sample: SampleTask) -> TurnListener | None:
        """Return a listener of the sample's turns, or None."""

    def on_result(self, sample: SampleTask, how: str) -> None:
        """Called for every attempt that has ended, before its result is sent. how: done, failed or stopped."""
        return None

    def on_end(self, sample: SampleTask) -> None:
        """Called when a sample has ended, but not for an attempt that a newer one of the same sample replaced."""
        return None

    def on_message(self, message: m.Message) -> None:
        """Called with each message of the coordinator."""

    def due_messages(self) -> Iterator[tuple[m.Message, list[bytes]]]:
        """Yield the messages to send now, with their arrays."""
        ...


class Places:
    """The number of samples that keep an engine busy: those that it decodes at a time, and those outside it meanwhile.

    It decodes `max_running` samples, or as many of the present kind as its cache holds. A sample holds, on average over
    its time, half of what it writes, and a group holds its prompt until its longest sample ends. Example: a cache of
    10,000 tokens, prompts of 400 and groups of four answers of 200 tokens give 0.9 * 10,000 / (400 / 4 + 200 / 2) = 45
    places; 60 if the samples spend a quarter of their time on rewards.
    """

    _KEPT, _CACHE_PART, _LEAST_INSIDE = 0.99, 0.9, 0.25

    def __init__(self, max_running: int, cache_tokens: int | None = None, *, shares_prompts: bool = True) -> None:
        """cache_tokens: tokens that the engine's cache holds; None: unknown, and no limit.

        shares_prompts: a group holds its prompt once; False: each sample does.
        """
        self._max_running, self._cache_tokens, self._shares_prompts = max_running, cache_tokens, shares_prompts
        # Sums over finished samples, newer ones weigh more: tokens written, times tokens held; seconds inside, all.
        self._written = self._held = self._inside_s = self._total_s = 0.0

    def observe(self, num_prompt: int, num_written: int, inside_s: float, total_s: float, num_before: int = 0) -> None:
        """Record a finished sample: its tokens, and its seconds in the engine and in all.

        num_before: tokens of the longest earlier sample of its group.
        """
        longer_by = max(0, num_written - num_before) if self._shares_prompts else num_written
        held = num_prompt * longer_by + num_written**2 / 2
        new = (num_written, held, inside_s, max(inside_s, total_s))
        old = (self._written, self._held, self._inside_s, self._total_s)
        pairs = zip(old, new, strict=True)
        self._written, self._held, self._inside_s, self._total_s = (self._KEPT * kept + more for kept, more in pairs)

    @property
    def num_samples(self) -> int:
        """Samples to have in flight."""
        num = float(self._max_running)
        if self._cache_tokens is not None and self._held:
            num = min(num, self._CACHE_PART * self._cache_tokens * self._written / self._held)
        if self._total_s:
            num /= max(self._LEAST_INSIDE, self._inside_s / self._total_s)
        return max(1, int(num))

    def room(self, num_here: int, group_size: int) -> int:
        """Return the number of further groups, of which the last may find too few places. num_here: samples."""
        return max(0, -(-(self.num_samples - num_here) // group_size))


class SamplesInFlight:
    """Runs as many samples as keep the engine busy, or `max_groups_in_flight` groups; further leases wait."""

    def __init__(
        self,
        player: Player,
        outbox: Outbox,
        failures: FailureCounts,
        settings: RolloutSettings,
        on_change: Callable[[], None],
        has_engine: Callable[[], bool] = lambda: True,
        attachments: Sequence[SampleAttachment] = (),
        places: Places | None = None,
    ) -> None:
        """on_change: called when a sample has ended. places: of the engine; None: of an engine of unknown limits.

        has_engine: False after the engine's death. This process ends within a second, and the coordinator takes its
        leases back.
        """
        self._player = player
        self._outbox = outbox
        self._failures = failures
        self._settings = settings
        self._on_change = on_change
        self._has_engine = has_engine
        self._attachments = attachments
        self._places = places or Places(DEFAULT_RUNNING)
        self._leases: deque[m.Lease] = deque()
        self._running: dict[tuple[str, int], _RunningSample] = {}
        self._open_groups: Counter[str] = Counter()
        self._longest: dict[str, int] = {}  # open group -> tokens of its longest finished sample here
        self._newest: dict[str, tuple[int, int]] = {}  # group -> (incarnation, attempt) of its newest lease

    @property
    def num_groups(self) -> int:
        """Groups with a sample in flight, and groups that wait for room."""
        return len(self._open_groups) + len(self._leases)

    @property
    def num_samples(self) -> int:
        """Samples in flight."""
        return len(self._running)

    @property
    def room(self) -> int:
        """Number of further groups with room."""
        if not self._has_engine():
            return 0
        if (limit := self._settings.max_groups_in_flight) is not None:
            return max(0, limit - self.num_groups)
        num_waiting = sum(len(lease.sample_indices) for lease in self._leases)
        return self._places.room(self.num_samples + num_waiting, self._settings.group_size)

    def unfinished_groups(self) -> dict[str, int]:
        """Return the attempt of each group with samples that the coordinator has not acknowledged."""
        names = {lease.group for lease in self._leases} | self._open_groups.keys()
        names |= {key.group for key in self._outbox.unanswered_keys()}
        return {name: self._newest[name][1] for name in names if name in self._newest}

    def add(self, lease: m.Lease, buffers: Sequence[bytes] = ()) -> None:
        """Queue a lease; `admit` starts it. A repeated lease is ignored, even long after its samples have finished.

        Raises: FrameError for inconsistent buffers.
        """
        stamp = (lease.incarnation, lease.attempt)
        if self._newest.get(lease.group, (0, 0)) >= stamp:
            return
        for attachment in self._attachments:
            attachment.on_lease(lease, buffers)
        # Newest last: the oldest lease is forgotten first.
        self._newest.pop(lease.group, None)
        self._newest[lease.group] = stamp
        if len(self._newest) > _MAX_GROUPS_REMEMBERED:
            del self._newest[next(iter(self._newest))]
        self._leases.append(lease)

    def cancel(self) -> None:
        """Stop every sample in flight."""
        for running in self._running.values():
            running.task.cancel()

    def admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start leases while there is room. Too many can arrive, because a Demand and a Lease may cross."""
        limit = self._settings.max_groups_in_flight
        while self._leases and (limit is None or len(self._open_groups) < limit):
            lease = self._leases.popleft()
            row = msgspec.msgpack.encode((lease.prompt, lease.label, lease.columns))
            for index in lease.sample_indices:
                self._start(tasks, _sample(lease, index, row))

    def stop(self, group: str, sample_index: int, attempt: int) -> None:
        """Stop an attempt at a sample that another server has taken over."""
        running = self._running.get((group, sample_index))
        if running is not None and running.attempt == attempt:
            running.task.cancel()

    def _start(self, tasks: asyncio.TaskGroup, sample: SampleTask) -> None:
        """Start a sample, replacing an older attempt at it. A finished attempt is not repeated."""
        place = (sample.group, sample.sample_index)
        if _key(sample) in self._outbox:
            return
        if (older := self._running.get(place)) is not None:
            older.task.cancel()
        self._open_groups[sample.group] += 1
        task = tasks.create_task(self._make(sample), name=sample.key)
        self._running[place] = _RunningSample(sample.attempt, task)
        # Not a `finally` in the task: a task that is cancelled before it starts never runs its body.
        task.add_done_callback(lambda ended: self._end(sample, is_stopped=ended.cancelled()))

    async def _make(self, sample: SampleTask) -> None:
        item = await self._play(sample)
        self._note_result(sample, "done" if isinstance(item, FinishedSample) else "failed")
        self._outbox.put(item)

    def _note_result(self, sample: SampleTask, how: str) -> None:
        for attachment in self._attachments:
            attachment.on_result(sample, how)

    async def _play(self, sample: SampleTask) -> Item:
        """Return the finished sample or its failure: any exception fails this sample only."""
        limit_s, progress = self._settings.lease_timeout_s, WrittenSoFar()
        listeners = [attachment.on_start(sample) for attachment in self._attachments]
        progress.listener = next((listener for listener in listeners if listener is not None), None)
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                trajectory = await self._player.play(sample, progress)
                facts = trajectory.facts
                num_written, total_s = facts.num_tokens - facts.num_prompt_tokens, facts.finished_at - facts.started_at
                before = self._longest.get(sample.group, 0)
                self._longest[sample.group] = max(before, num_written)
                self._places.observe(facts.num_prompt_tokens, num_written, facts.generate_s, total_s, before)
                return FinishedSample(_key(sample), trajectory)
        except BaseException as error:
            if is_own_cancellation(error):
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                late = f"{sample.key} was not made within rollout.lease_timeout_s = {limit_s:g} s"
                error = NeighbourError("lease", late)
            failure = self._count_failure(sample, error, progress)
            if not self._has_engine():
                # As a failure, the prompt would return here at once, fail twice more within milliseconds, and be
                # skipped. Instead the coordinator takes it back from a dead server.
                await asyncio.Event().wait()
            return failure

    def _count_failure(self, sample: SampleTask, error: BaseException, progress: WrittenSoFar) -> Failure:
        """Count and log a failure, with a traceback if code of this process raised it."""
        if isinstance(error, NeighbourError):
            boundary, detail = one_line(error.boundary, 200) or "unnamed", one_line(error.detail, 2000)
            place = one_line(error.place, 2000)
            raised = error.__cause__ if boundary in (ENVIRONMENT, AGENT) else None
        else:
            boundary, detail, place, raised = "sample", describe_error(error), place_of(error), error
        self._failures.add(boundary, detail, "the sample's lease went back", raised)
        return Failure(_key(sample), boundary, detail, progress.num_model_tokens, place)

    def _end(self, sample: SampleTask, *, is_stopped: bool) -> None:
        """Release a sample's room."""
        if is_stopped:
            self._note_result(sample, "stopped")
        place = (sample.group, sample.sample_index)
        running = self._running.get(place)
        if running is not None and running.attempt == sample.attempt:
            del self._running[place]
            for attachment in self._attachments:
                attachment.on_end(sample)
        self._open_groups[sample.group] -= 1
        if not self._open_groups[sample.group]:
            del self._open_groups[sample.group]
            self._longest.pop(sample.group, None)
        self._on_change()


@dataclass
class _RunningSample:
    """A sample in flight."""

    attempt: int
    task: asyncio.Task[None]


def _key(sample: SampleTask) -> Key:
    return Key(sample.group, sample.sample_index, sample.incarnation, sample.attempt)


def _sample(lease: m.Lease, index: int, row: bytes) -> SampleTask:
    """Return one sample of a lease. row: encoded prompt, label and columns."""
    # Each sample decodes its own row: an environment may change its row.
    prompt, label, columns = msgspec.msgpack.decode(row)
    task = Task(prompt, label, columns, is_greedy=index in lease.greedy_indices)
    temperature = None if lease.temperature is msgspec.UNSET else lease.temperature
    return SampleTask(lease.group, index, lease.attempt, lease.incarnation, lease.kind, lease.seed, task, temperature)
