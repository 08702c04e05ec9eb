"""A run in simulated time: servers that decode, rewards, the staleness window, ranks and pushes.

    leases -> Engine (samples decode together) -> reward -> ready groups -> parts of a step -> push -> free slots

Which groups a step takes is decided by the real `StalenessWindow`. Messages, checkpoints and evaluations take no time.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from pydantic import NonNegativeFloat, PositiveFloat

from learner.data.window import Outstanding, StalenessWindow
from protocol.settings.section import Section


class Rates(Section):
    """Seconds that a run's parts take."""

    token_s: PositiveFloat  # a decoding step of one server, without the shares of its samples
    token_sample_s: NonNegativeFloat = 0.0  # the share of each running sample in a decoding step
    train_token_s: NonNegativeFloat  # one token of the policy on one rank, in all passes
    step_s: NonNegativeFloat = 0.0  # the rest of a step on the ranks: optimizer, messages
    push_s: NonNegativeFloat = 0.0  # end of training until the next step may begin
    pause_s: NonNegativeFloat = 0.0  # the part of a push in which servers do not generate
    reward_s: NonNegativeFloat = 0.0  # environment and reward of a sample
    num_cores: NonNegativeFloat = 0.0  # cores of servers (one each) and ranks (all together); 0: own devices


@dataclass(frozen=True)
class Layout:
    """The numbers of a run that decide its speed."""

    num_servers: int
    num_ranks: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    max_groups: int | None = None  # groups in flight on a server; None: as many samples as it decodes at a time
    max_running: int = 256  # samples that a server decodes at a time; further ones wait in it
    is_streamed: bool = True  # a step begins with the groups that are ready
    shares_devices: bool = False  # ranks and servers take turns on the same devices: nothing overlaps


@dataclass(frozen=True)
class Outcome:
    """The speed of a run."""

    step_s: float
    samples_per_s: float
    tokens_per_s: float  # trained tokens of the policy
    server_idle: float  # share of the time in which a server has no sample to decode, or is paused
    rank_idle: float  # share of the time in which ranks do not train


class Engine:
    """Samples that decode together. A sample of n tokens ends n decoding steps after its start.

    Call `advance` before each change. Example: with token_s 0.01 and token_sample_s 0.005, two samples of 100 tokens
    that start together end after 100 * (0.01 + 2 * 0.005) = 2 s.
    """

    def __init__(self, rates: Rates, max_running: int) -> None:
        self.speed = 1.0  # share of its full speed; 0: paused
        self.busy_s = 0.0  # seconds with samples, without pauses
        self.num_steps = 0.0  # decoding steps so far
        self.num_tokens = 0.0  # decoded so far
        self._token_s, self._token_sample_s = rates.token_s, rates.token_sample_s
        self._max_running, self._now = max_running, 0.0
        self._ends: list[tuple[float, int]] = []  # (decoding step, sample), soonest first
        self._waiting: deque[tuple[int, int]] = deque()

    @property
    def num_samples(self) -> int:
        """Samples that decode, or wait for a place."""
        return len(self._ends) + len(self._waiting)

    @property
    def ends_at(self) -> float:
        """When the next sample ends, if nothing changes."""
        if not self._ends or not self.speed:
            return math.inf
        return self._now + max(0.0, self._ends[0][0] - self.num_steps) * self._step_s / self.speed

    def add(self, sample: int, num_tokens: int) -> None:
        """Start a sample, or have it wait for a place."""
        self._waiting.append((sample, num_tokens))
        self._admit()

    def advance(self, now: float) -> list[int]:
        """Decode until `now`, which is at most `ends_at`; return the samples that end then."""
        if self._ends and self.speed:
            steps = (now - self._now) * self.speed / self._step_s
            self.num_steps += steps
            self.num_tokens += steps * len(self._ends)
            self.busy_s += now - self._now
        self._now, ended = now, []
        while self._ends and self._ends[0][0] <= self.num_steps + 1e-6:
            ended.append(heappop(self._ends)[1])
        self._admit()
        return ended

    @property
    def _step_s(self) -> float:
        return self._token_s + len(self._ends) * self._token_sample_s

    def _admit(self) -> None:
        while self._waiting and len(self._ends) < self._max_running:
            sample, num_tokens = self._waiting.popleft()
            heappush(self._ends, (self.num_steps + num_tokens, sample))


@dataclass(eq=False)
class _Group:
    server: int
    version: int  # of the server's weights at the lease
    num_tokens: int
    num_missing: int  # samples that are not back
    is_taken: bool = False  # a step has it


def simulate(layout: Layout, rates: Rates, draw_length: Callable[[], int], num_steps: int, skip: int = 1) -> Outcome:
    """Return a run of so many steps, without the first `skip`. draw_length: returns a sample's number of tokens."""
    run = _Run(layout, rates, draw_length)
    marks: list[tuple[float, float, float, float]] = []
    while run.version < num_steps:
        run.advance()
        if run.version == (num_steps if marks else skip):
            marks.append((run.now, run.num_trained, sum(engine.busy_s for engine in run.engines), run.training_s))
    seconds, num_tokens, busy_s, training_s = (end - begin for begin, end in zip(*marks, strict=True))
    num_steps -= skip
    return Outcome(
        step_s=seconds / num_steps,
        samples_per_s=num_steps * layout.groups_per_step * layout.group_size / seconds,
        tokens_per_s=num_tokens / seconds,
        server_idle=1.0 - busy_s / seconds / layout.num_servers,
        rank_idle=1.0 - training_s / seconds,
    )


class _Run:
    """`advance` moves to the next event."""

    def __init__(self, layout: Layout, rates: Rates, draw_length: Callable[[], int]) -> None:
        self.now, self.version, self.num_trained, self.training_s = 0.0, 0, 0, 0.0
        self.engines = [Engine(rates, layout.max_running) for _ in range(layout.num_servers)]
        self._layout, self._rates, self._draw = layout, rates, draw_length
        self._window = StalenessWindow(layout.groups_per_step, layout.max_staleness)
        self._groups: dict[str, _Group] = {}  # that hold a slot of the window, in lease order
        self._of_sample: dict[int, _Group] = {}
        self._num_open = [0] * layout.num_servers  # groups with missing samples
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._num_leased = self._num_timers = self._num_taken = 0  # taken: groups that the running step has
        self._left_s: float | None = None  # training that the present part still takes at full speed; None: none runs
        self._is_pushing = self._is_paused = False
        self._has_news = True  # a ready group or a new step may let a part begin

    def advance(self) -> None:
        self._lease()
        self._begin_part()
        speed = self._set_speeds()
        trained_at = math.inf if self._left_s is None else self.now + self._left_s / speed
        timer_at = self._timers[0][0] if self._timers else math.inf
        at = min(trained_at, timer_at, *(engine.ends_at for engine in self.engines))
        if self._left_s is not None:
            self._left_s -= (at - self.now) * speed
            self.training_s += at - self.now
        self.now = at
        for engine in self.engines:
            for sample in engine.advance(at):
                self._after(self._rates.reward_s, partial(self._receive, sample))
        if trained_at <= at:
            self._end_part()
        while self._timers and self._timers[0][0] <= at:
            heappop(self._timers)[2]()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._num_timers += 1
        heappush(self._timers, (self.now + seconds, self._num_timers, call))

    def _set_speeds(self) -> float:
        """Set the engines' speeds; return that of the ranks. Busy servers and ranks share the cores."""
        cores, is_training = self._rates.num_cores, self._left_s is not None
        is_asleep = self._is_paused or (self._layout.shares_devices and (is_training or self._is_pushing))
        num_busy: float = 0 if is_asleep else sum(engine.num_samples > 0 for engine in self.engines)
        num_busy += max(self._layout.num_ranks, cores) * is_training
        speed = min(1.0, cores / num_busy) if cores and num_busy else 1.0
        for engine in self.engines:
            engine.speed = 0.0 if is_asleep else speed
        return speed

    def _lease(self) -> None:
        """Lease new groups to the server with the fewest of those with room, while the window has slots."""
        size = self._layout.group_size
        while len(self._groups) < self._window.size:
            rooms = [self._room(server) for server in range(len(self.engines))]
            with_room = [server for server, room in enumerate(rooms) if room > 0]
            if not with_room:
                return
            server = min(with_room, key=lambda index: (self._num_open[index], -rooms[index]))
            lengths = [self._draw() for _ in range(size)]
            group = _Group(server, self.version, sum(lengths), size)
            self._groups[f"g{self._num_leased}"] = group
            for sample, length in enumerate(lengths, self._num_leased * size):
                self._of_sample[sample] = group
                self.engines[server].add(sample, length)
            self._num_leased += 1
            self._num_open[server] += 1

    def _room(self, server: int) -> int:
        """Return the number of groups for which a server has room, as `rollout.session` does."""
        layout = self._layout
        if layout.max_groups is not None:
            return layout.max_groups - self._num_open[server]
        return -(-(layout.max_running - self.engines[server].num_samples) // layout.group_size)

    def _receive(self, sample: int) -> None:
        group = self._of_sample.pop(sample)
        group.num_missing -= 1
        if not group.num_missing:
            self._num_open[group.server] -= 1
            self._has_news = True

    def _begin_part(self) -> None:
        """Begin the next part of a step, if the ranks wait and the window has one for them."""
        if self._left_s is not None or self._is_pushing or not self._has_news:
            return
        layout, self._has_news = self._layout, False
        lacking = layout.groups_per_step - self._num_taken
        in_parts = layout.is_streamed and not layout.shares_devices
        fewest = self._window.fewest(self._num_taken, in_parts=in_parts)
        free = [(name, group) for name, group in self._groups.items() if not group.is_taken]
        if sum(not group.num_missing for _, group in free) < fewest:
            return
        outstanding = [Outstanding(name, group.version, not group.num_missing) for name, group in free]
        taken = self._window.choose(outstanding, self.version, "wait", self._num_taken, fewest).groups
        if not taken:
            return
        for name in taken:
            self._groups[name].is_taken = True
        num_tokens = sum(self._groups[name].num_tokens for name in taken)
        self._num_taken += len(taken)
        self._left_s = num_tokens * self._rates.train_token_s / layout.num_ranks
        self._left_s += self._rates.step_s * (len(taken) == lacking)

    def _end_part(self) -> None:
        self._left_s, self._has_news = None, True
        if self._num_taken == self._layout.groups_per_step:
            self._is_pushing = self._is_paused = True
            self._after(self._rates.pause_s, self._resume)
            self._after(max(self._rates.push_s, self._rates.pause_s), self._end_step)

    def _resume(self) -> None:
        self._is_paused = False

    def _end_step(self) -> None:
        self._is_pushing, self._num_taken, self._has_news = False, 0, True
        self.version += 1
        self.num_trained += sum(group.num_tokens for group in self._groups.values() if group.is_taken)
        self._groups = {name: group for name, group in self._groups.items() if not group.is_taken}
