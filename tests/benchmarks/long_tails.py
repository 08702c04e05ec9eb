"""Answers with long tails: `python -m tests.benchmarks.long_tails [--seed N] [--short] [--groups N]`.

The real coordinator, its ledger and its window, in simulated time, with scripted servers. Lengths are lognormal: the
longest of 100 answers has ten times the median of 500 tokens, and 8,192 tokens is the limit. A server decodes a step in
8 ms and 0.07 ms for each of at most 256 samples, and admits leases by the rule of the real session. Steps of 128 groups
of 8, staleness 4; ranks need 60 % of the servers' time. Figures are over 20 steps after the first eight. --groups N:
rollout.max_groups_in_flight.

    idle    share of the time in which a server has nothing to decode, or is paused by a push
    unused  share of what full servers would have decoded that was not decoded
    ks      largest distance between the distributions of the lengths of all leased samples and of the trained ones
    waste   tokens of samples that were not trained, of all decoded tokens

holds: idle is at most 5 %, ks at most 0.02, waste at most 2 %, with 1, 2 and 4 servers.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from learner.run.simulation import Engine, Rates
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, VersionSpan, decode_facts
from rollout.session.samples_in_flight import Places
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.running_coordinator import RUN_ID, STAMP
from tests.protocol.wire.examples import example_facts

_IDLE, _KS, _WASTE = 0.05, 0.02, 0.02
_MEDIAN, _LONGEST, _PROMPT = 500, 8192, 64
_SIGMA = math.log(10.0) / 2.326  # of the logarithm: the 99th percentile is ten times the median
RATES = Rates(token_s=0.008, token_sample_s=0.00007, train_token_s=0.0, push_s=2.0, pause_s=0.2, reward_s=1.0)
_PLACES = 256
GROUPS, SAMPLES, _STALENESS = 128, 8, 4


@dataclass(frozen=True)
class Figures:
    idle: float
    unused: float
    ks: float
    waste: float
    step_s: float


def main() -> int:
    arguments = options(__doc__ or "", groups=0)
    counts, steps = ([2], (2, 5)) if arguments.short else ([1, 2, 4], (8, 28))
    all_figures = []
    for num_servers in counts:
        figures = measure(num_servers, steps, arguments.seed, arguments.groups)
        all_figures.append(figures)
        print(
            f"{num_servers} servers: idle {figures.idle:.3f}, unused {figures.unused:.3f}, ks {figures.ks:.4f}, "
            f"waste {figures.waste:.4f}, step {figures.step_s:.1f} s",
            flush=True,
        )
    worst = {name: max(getattr(each, name) for each in all_figures) for name in ("idle", "unused", "ks", "waste")}
    is_fair = arguments.short or worst["ks"] <= _KS
    return conclude("long_tails", worst["idle"] <= _IDLE and is_fair and worst["waste"] <= _WASTE, **worst)


def measure(num_servers: int, steps: tuple[int, int], seed: int, max_groups: int = 0) -> Figures:
    """Return the figures of a run from the end of the first of these steps to the end of the other.

    max_groups: groups in flight on a server; 0: as many samples as it decodes at a time.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _Run(Path(folder), num_servers, steps[1], seed, max_groups).measure(*steps)


@dataclass
class _Sample:
    lease: m.Lease
    index: int
    num_tokens: int
    begun_at: float


@dataclass
class _Server:
    """A scripted server: it leases, decodes and has answers scored."""

    name: str
    engine: Engine = field(default_factory=lambda: Engine(RATES, _PLACES))
    samples: dict[int, _Sample] = field(default_factory=dict)  # that decode, wait or are scored
    pushes: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])  # (decoding step, version from there)
    newest_lease: int = 0
    demand: tuple[int, int, int] | None = None  # its last one: room, version, newest lease

    places: Places = field(default_factory=lambda: Places(_PLACES))

    max_groups: int = 0

    @property
    def room(self) -> int:
        if self.max_groups:
            return max(0, self.max_groups - len({sample.lease.group for sample in self.samples.values()}))
        return self.places.room(len(self.samples), SAMPLES)

    def spans(self, sample: _Sample) -> list[VersionSpan]:
        """Return which versions wrote the sample, whose last token was decoded just now."""
        end = self.engine.num_steps
        first, spans = end - sample.num_tokens, []
        marks = [*self.pushes, (math.inf, -1)]
        for (begin, version), (until, _) in pairwise(marks):
            low, high = (round(max(0.0, min(at, end) - first)) for at in (begin, until))
            if high > low:
                spans.append(VersionSpan(_PROMPT + low, _PROMPT + high, version))
        return spans


class _Run:
    """The run in simulated time: events of servers, rewards and ranks, each followed by a turn of the coordinator."""

    def __init__(self, folder: Path, num_servers: int, num_steps: int, seed: int, max_groups: int) -> None:
        sections: dict[str, dict[str, Any]] = {
            "run": {"max_steps": num_steps + 2 * _STALENESS, "seed": seed},  # a run leases nothing beyond its last step
            "rollout": {"group_size": SAMPLES, "lease_timeout_s": 36_000},
            "learner": {"groups_per_step": GROUPS, "max_staleness": _STALENESS, "checkpoint_every_steps": 0},
        }
        prompts = [Prompt(f"p{i}", f"question {i}", "", {}) for i in range(50_000)]
        self._ledger = Ledger(folder / "ledger.sqlite")
        record = RunRecord(folder, 0)
        settings = Settings.model_validate(sections)
        self._coordinator = Coordinator(settings, RUN_ID, self._ledger, prompts, [], record, last_step=0)
        self._random, self._now, self._num_events, self._num_samples = Random(seed), 0.0, 0, 0
        self._servers = {f"s{i}": _Server(f"s{i}", max_groups=max_groups) for i in range(num_servers)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._part, self._train_token_s = 0, train_token_s(num_servers)
        self.leased: list[int] = []  # lengths of all samples
        self.trained: list[int] = []
        self.ended: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]  # of each step: time, busy seconds, tokens

    def measure(self, first: int, last: int) -> Figures:
        for server in self._servers.values():
            self._tell(server.name, m.Hello(**STAMP, server=server.name, policy_version=0))
        self._ask()
        while len(self.ended) <= last:
            self._turn()
            self._advance()
        (begin_s, begin_busy, begin_tokens), (end_s, busy, tokens) = self.ended[first], self.ended[last]
        seconds, num_servers = end_s - begin_s, len(self._servers)
        full = num_servers * seconds * _PLACES / (RATES.token_s + _PLACES * RATES.token_sample_s)
        (wasted,) = self._ledger._db.execute("SELECT COALESCE(SUM(num_tokens), 0) FROM waste").fetchone()
        self._ledger.close()
        return Figures(
            idle=1.0 - (busy - begin_busy) / seconds / num_servers,
            unused=1.0 - (tokens - begin_tokens) / full,
            ks=distance(self.leased, self.trained),
            waste=wasted / tokens,
            step_s=seconds / (last - first),
        )

    # -- time ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        event_at = self._events[0][0] if self._events else math.inf
        self._now = at = min(event_at, *(server.engine.ends_at for server in self._servers.values()))
        for server in self._servers.values():
            for number in server.engine.advance(at):
                done = partial(self._finish, server, number, server.spans(server.samples[number]))
                self._after(RATES.reward_s, done)
        while self._events and self._events[0][0] <= at:
            heappop(self._events)[2]()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (self._now + seconds, self._num_events, call))

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def _tell(self, peer: str, message: m.Message, buffers: list[bytes] | None = None) -> None:
        self._coordinator.receive(peer, message, buffers or [], self._now)

    def _turn(self) -> None:
        """Have the servers say what they have room for, and the coordinator answer until it has nothing to say."""
        is_new = True
        while is_new:
            for server in self._servers.values():
                demand = (server.room, server.pushes[-1][1], server.newest_lease)
                if demand != server.demand:
                    server.demand = demand
                    self._demand(server, *demand)
            self._coordinator.advance(self._now)
            mail = self._coordinator.take_outgoing()
            is_new = self._coordinator.has_more_to_do or any(isinstance(message, m.Lease) for _, message, _ in mail)
            for peer, message, buffers in mail:
                self._take(peer, message, buffers)

    def _demand(self, server: _Server, room: int, version: int, newest: int) -> None:
        here = {sample.lease.group: sample.lease.attempt for sample in server.samples.values()}
        demand = m.Demand(**STAMP, num_groups=room, policy_version=version, heard_of_lease=newest, leases=here)
        self._tell(server.name, demand)

    def _take(self, peer: str, message: m.Message, buffers: Sequence[bytes]) -> None:
        match message:
            case m.Lease():
                self._start(self._servers[peer], message)
            case m.Batch():
                lengths = [facts.num_model_tokens for facts in decode_facts(buffers[0])]
                self.trained += lengths
                self._after(
                    sum(lengths) * self._train_token_s, partial(self._end_part, is_last=message.is_last is not False)
                )
            case m.Wait() | m.PushAgain():
                self._ask()
            case m.Refusal():
                raise AssertionError(message.detail)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _start(self, server: _Server, lease: m.Lease) -> None:
        server.newest_lease = max(server.newest_lease, lease.number)
        for index in lease.sample_indices:
            length = draw_length(self._random)
            self._num_samples += 1
            server.samples[self._num_samples] = _Sample(lease, index, length, self._now)
            server.engine.add(self._num_samples, length)
            self.leased.append(length)

    def _finish(self, server: _Server, number: int, spans: list[VersionSpan]) -> None:
        sample = server.samples.pop(number)
        total_s = self._now - sample.begun_at
        server.places.observe(_PROMPT, sample.num_tokens, total_s - RATES.reward_s, total_s)
        facts = _facts(server.name, sample, spans)
        arrays = _arrays(facts.num_tokens)
        self._tell(server.name, m.TrajectoryDone(**STAMP, facts=facts), Trajectory(facts, *arrays).to_buffers())

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._tell("rank-0", m.NextBatch(**STAMP, step=self._coordinator.step + 1, rank=0, part=self._part))

    def _end_part(self, is_last: bool) -> None:
        if not is_last:
            self._part += 1
            self._ask()
            return
        for server in self._servers.values():
            server.engine.speed = 0.0
        self._after(RATES.pause_s, self._resume)
        self._after(RATES.push_s, self._end_step)

    def _resume(self) -> None:
        for server in self._servers.values():
            server.engine.speed = 1.0
            server.pushes.append((server.engine.num_steps, self._coordinator.policy_version + 1))

    def _end_step(self) -> None:
        step = self._coordinator.step + 1
        self._tell(
            "rank-0",
            m.StepEnd(**STAMP, step=step, policy_version=step, is_applied=True, detail="", metrics={}),
        )
        engines = [server.engine for server in self._servers.values()]
        busy_s, num_tokens = sum(engine.busy_s for engine in engines), sum(engine.num_tokens for engine in engines)
        self.ended.append((self._now, busy_s, num_tokens))
        self._part = 0
        self._ask()


def draw_length(draw: Random) -> int:
    return min(_LONGEST, max(1, round(draw.lognormvariate(math.log(_MEDIAN), _SIGMA))))


def train_token_s(num_servers: int) -> float:
    """Return the ranks' time for a token: 60 % of that of full servers."""
    return 0.6 * (RATES.token_s / _PLACES + RATES.token_sample_s) / num_servers


def distance(one: list[int], other: list[int]) -> float:
    """Return the largest distance of two samples' distribution functions (Kolmogorov-Smirnov)."""
    points = np.unique(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def _facts(server: str, sample: _Sample, spans: list[VersionSpan]) -> TrajectoryFacts:
    lease = sample.lease
    return example_facts(
        group=lease.group,
        sample_index=sample.index,
        server=server,
        attempt=lease.attempt,
        incarnation=1,
        reward=float(sample.index % 2),
        reward_parts={"exact_match": float(sample.index % 2)},
        num_tokens=_PROMPT + sample.num_tokens,
        num_prompt_tokens=_PROMPT,
        num_turns=1,
        version_spans=spans,
    )


_IDS, _LOGPROBS = np.ones(_PROMPT + _LONGEST, np.int32), np.full(_PROMPT + _LONGEST, -0.5, np.float32)
_LOGPROBS[:_PROMPT] = 0.0
_WRITTEN = (np.arange(_PROMPT + _LONGEST) >= _PROMPT).astype(np.uint8)


def _arrays(num_tokens: int) -> tuple[Any, Any, Any]:
    return _IDS[:num_tokens], _LOGPROBS[:num_tokens], _WRITTEN[:num_tokens]


if __name__ == "__main__":
    sys.exit(main())
