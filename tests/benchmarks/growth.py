"""What a larger run costs the coordinator: `python -m tests.benchmarks.growth [--seed N] [--short]`.

Scripted rollout servers and ranks of another process make whole steps with a coordinator and its ledger, over real
encrypted sockets. All runs have steps of 8,192 samples and a staleness of 4: with 1 to 1,024 servers, 1 to 64 ranks,
groups of 8 and 64, and once with a million prompts and a curriculum. A server asks for its share of the window and
answers a lease at once. Like a real one it sends a demand at every step and, once a second, a demand and a heartbeat. A
second is the time in which 8,192 samples come, for the coordinator's pings too: it takes no more, and the time that the
scripted peers need beside it does not count.
Ranks ask for parts, as by default. Figures are the thread's CPU time. --short: 512 samples a step, 1 and 64 servers.

    cost        CPU of a trajectory, from its lease to its step's end; over that with one server and one rank
    turn        CPU of one turn of the loop: 99 of 100 take less
    memory      of the process by a trajectory that is out, with a window of 2,560 groups and with four times as many
    planning    32,768 samples in groups with a prompt, for 64 ranks
    waiting     share of a core that 1,024 servers take which only say each second that they are at work

holds: cost is at most 1.2 times, a turn 20 ms, memory at most 1.2 times for each trajectory, planning 0.3 s.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import zmq

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.loop import tune_garbage_collector
from learner.data.packing import plan_groups
from learner.rank.coordinator_client import BATCH_LIMITS
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from protocol.wire.trajectory import Trajectory, VersionSpan
from tests.benchmarks.many_peers import allow_descriptors
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.running_coordinator import STAMP, Place, running_coordinator
from tests.protocol.wire.examples import example_facts

_COST, _TURN_MS, _PLANNING_S = 1.2, 20.0, 0.3
_STALENESS, _NUM_STEPS, _SAMPLES_PER_S = 4, 6, 8192
_WAIT_S = 20.0
_TOKENS, _PROMPT = 256, 64  # of a trajectory


@dataclass(frozen=True)
class Size:
    servers: int = 1
    ranks: int = 1
    group_size: int = 8
    groups_per_step: int = 1024
    num_prompts: int = 20_000
    has_curriculum: bool = False

    def settings(self) -> dict[str, dict[str, Any]]:
        learner = {
            "groups_per_step": self.groups_per_step,
            "num_ranks": self.ranks,
            "max_staleness": _STALENESS,
            "checkpoint_every_steps": 0,
        }
        data = {"curriculum": {"easy": 0.9, "hard": 0.1}} if self.has_curriculum else {}
        rollout = {"group_size": self.group_size, "lease_timeout_s": 1800}
        return {"run": {"max_steps": 100}, "rollout": rollout, "learner": learner, "data": data}


@dataclass(frozen=True)
class Cost:
    of_trajectory_ms: float
    turn_ms: float  # 99 of 100 are shorter
    bytes_out: float  # memory of the process for each trajectory that is out


def main() -> int:
    arguments = options(__doc__ or "")
    base = Size(groups_per_step=64, num_prompts=2000) if arguments.short else Size()
    sizes = [replace(base, servers=64)] if arguments.short else _sizes(base)
    first = _measure(base)
    _tell(base, first, first)
    others = [_tell(size, _measure(size), first) for size in sizes]
    narrow, wide = (_measure(replace(base, groups_per_step=n * base.groups_per_step // 2)).bytes_out for n in (1, 4))
    print(f"memory of a trajectory that is out: {narrow:.0f} bytes, {wide:.0f} in a window four times as wide")
    planning_s = _plan(arguments.seed)
    figures = {
        "cost": max(cost.of_trajectory_ms for cost in others) / first.of_trajectory_ms,
        "turn_ms": max(cost.turn_ms for cost in (first, *others)),
        "memory": wide / narrow,
        "planning_s": planning_s,
        "waiting": _measure_waiting(sizes[-1] if arguments.short else replace(base, servers=1024)),
    }
    limits = {"cost": _COST, "turn_ms": _TURN_MS, "memory": _COST, "planning_s": _PLANNING_S}
    holds = arguments.short or all(figures[name] <= limit for name, limit in limits.items())
    return conclude("growth", holds, **figures)


def _sizes(base: Size) -> list[Size]:
    return [
        replace(base, servers=32),
        replace(base, servers=1024),
        replace(base, ranks=64),
        replace(base, servers=1024, ranks=64),
        replace(base, servers=32, group_size=64, groups_per_step=128),
        replace(base, servers=32, num_prompts=1_000_000, has_curriculum=True),
    ]


def _tell(size: Size, cost: Cost, first: Cost) -> Cost:
    name = f"{size.servers} servers, {size.ranks} ranks, groups of {size.group_size}, {size.num_prompts:,} prompts"
    ratio = cost.of_trajectory_ms / first.of_trajectory_ms
    print(f"{name}: {cost.of_trajectory_ms:.3f} ms a trajectory ({ratio:.2f}), turn {cost.turn_ms:.1f} ms", flush=True)
    return cost


def _measure(size: Size) -> Cost:
    with _other_process() as process:
        return process.submit(_run, size).result()


def _measure_waiting(size: Size) -> float:
    """Return the share of a core that servers take which are at work on their leases."""
    with _other_process() as process:
        share = process.submit(_run_waiting, size).result()
    print(f"{size.servers} servers at work, each with two messages a second: {100 * share:.1f} % of a core")
    return share


def _other_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def _run(size: Size) -> Cost:
    """Take the steps with a coordinator in this process, and the peers in another."""
    allow_descriptors()
    turns: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running_coordinator(Path(folder), size.settings(), size.num_prompts) as run,
    ):
        tune_garbage_collector()
        _ping_by_samples(run.coordinator)
        run.coordinator.advance = _timed(run.coordinator.advance, turns)  # type: ignore[method-assign]
        process = psutil.Process()
        held = most = process.memory_info().rss
        with _other_process() as peers:
            playing = peers.submit(_play, run.place, size)
            while not playing.done():
                most = max(most, process.memory_info().rss)
                time.sleep(0.02)
            num_trajectories = playing.result()
    costs = [after - before for before, after in pairwise(turns)]
    window = (_STALENESS + 1) * size.groups_per_step * size.group_size
    busy = turns[-1] - turns[0]
    turn_ms = 1000.0 * float(np.percentile(costs, 99))
    return Cost(1000.0 * busy / num_trajectories, turn_ms, (most - held) / window)


def _run_waiting(size: Size) -> float:
    allow_descriptors()
    turns: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running_coordinator(Path(folder), size.settings(), size.num_prompts) as run,
        _other_process() as peers,
    ):
        waiting = peers.submit(_wait, run.place, size)
        time.sleep(_WAIT_S / 2)  # all have connected, and have their leases
        run.coordinator.advance = _timed(run.coordinator.advance, turns)  # type: ignore[method-assign]
        begun = time.monotonic()
        waiting.result()
        return (turns[-1] - turns[0]) / (time.monotonic() - begun)


def _wait(place: Place, size: Size) -> None:
    allow_descriptors()
    with zmq.Context() as context:
        context.max_sockets = size.servers + size.ranks + 10
        Peers(place, size, context).wait(_WAIT_S)


def _timed(advance: Callable[[float], None], turns: list[float]) -> Callable[[float], None]:
    def timed(now: float) -> None:
        turns.append(time.thread_time())
        advance(now)

    return timed


def _ping_by_samples(coordinator: Coordinator) -> None:
    """Have the coordinator ping its servers once for each `_SAMPLES_PER_S` trajectories."""
    receive, ping, num_samples = coordinator.receive, coordinator._ping, 0

    def receive_counted(peer: str, message: m.Message, buffers: list[bytes], now: float) -> None:
        nonlocal num_samples
        num_samples += isinstance(message, m.TrajectoryDone)
        receive(peer, message, buffers, now)

    def ping_counted(now: float) -> None:
        ping(num_samples / _SAMPLES_PER_S)

    coordinator.receive = receive_counted  # type: ignore[method-assign]
    coordinator._ping = ping_counted  # type: ignore[method-assign]


def _play(place: Place, size: Size) -> int:
    """Play servers and ranks until the steps are done; return the number of trajectories."""
    allow_descriptors()
    with zmq.Context() as context:
        context.max_sockets = size.servers + size.ranks + 10
        return Peers(place, size, context).play()


class Peers:
    """All servers and ranks of a run. A server has the weights of each step as soon as rank 0 says that it ended."""

    def __init__(self, place: Place, size: Size, context: "zmq.Context[Any]") -> None:
        self._size, self._decoder = size, Decoder(m.ToServer | m.ToRank, BATCH_LIMITS)
        self._poller = zmq.Poller()
        self._sockets: dict[Any, str] = {}
        self._of: dict[str, Any] = {}
        self._open: dict[str, dict[str, int]] = defaultdict(dict)  # server: unfinished group: attempt
        self._is_waiting = False  # True: leases are not answered
        self._newest: dict[str, int] = defaultdict(int)
        self._version, self._step, self._num_sent = 0, 1, 0
        self._num_said = 0  # servers that said what they have, over all seconds
        self._parts = [0] * size.ranks  # parts of the step that each rank has
        self._whole: set[int] = set()  # ranks that have the last part
        names = [*(f"s{i}" for i in range(size.servers)), *(f"rank-{i}" for i in range(size.ranks))]
        for name in names:
            socket = place.connect(context, name)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets[socket], self._of[name] = name, socket
        self._servers, self._ranks = names[: size.servers], names[size.servers :]

    def play(self) -> int:
        for server in self._servers:
            self._send(server, m.Hello(**STAMP, server=server, policy_version=0))
            self._demand(server)
        self._ask_all()
        while self._step <= _NUM_STEPS:
            self._say(self._num_sent * len(self._servers) // _SAMPLES_PER_S)
            self._receive(50)
        self._close()
        return self._num_sent

    def wait(self, seconds: float) -> None:
        """Have all servers say each second that they still work on their leases."""
        self._is_waiting = True
        for server in self._servers:
            self._send(server, m.Hello(**STAMP, server=server, policy_version=0))
        begun = time.monotonic()
        while (passed_s := time.monotonic() - begun) < seconds:
            self._say(int(passed_s * len(self._servers)))
            self._receive(5)
        self._close()

    def _receive(self, wait_ms: int) -> None:
        for socket, _ in self._poller.poll(wait_ms):
            for _ in range(64):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(self._sockets[socket], *self._decoder.decode(frames))

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _take(self, peer: str, message: m.Message, buffers: Any) -> None:
        if isinstance(message, m.Lease):
            self._newest[peer] = max(self._newest[peer], message.number)
            if self._is_waiting:
                self._open[peer][message.group] = message.attempt
            else:
                self._finish(peer, message)
        elif isinstance(message, m.Batch) and message.step == self._step:
            rank = int(peer.removeprefix("rank-"))
            self._parts[rank] += 1
            if not message.is_last:
                self._ask(rank)
                return
            self._whole.add(rank)
            if len(self._whole) == len(self._ranks):
                end = m.StepEnd(
                    **STAMP, step=self._step, policy_version=self._step, is_applied=True, detail="", metrics={}
                )
                self._send("rank-0", end)
        elif isinstance(message, m.Done) and peer == "rank-0" and len(self._whole) == len(self._ranks):
            self._version, self._step = self._step, self._step + 1
            self._ask_all()
            for server in self._servers:
                self._demand(server)
        elif isinstance(message, m.Wait | m.PushAgain):
            self._ask(int(peer.removeprefix("rank-")))

    def _ask_all(self) -> None:
        self._whole, self._parts = set(), [0] * len(self._ranks)
        for rank in range(len(self._ranks)):
            self._ask(rank)

    def _ask(self, rank: int) -> None:
        question = m.NextBatch(**STAMP, step=self._step, rank=rank, part=self._parts[rank])
        self._send(f"rank-{rank}", question)

    def _say(self, num_servers: int) -> None:
        """Have servers say what they have, each in its turn, until so many did."""
        while self._num_said < num_servers:
            server = self._servers[self._num_said % len(self._servers)]
            self._num_said += 1
            self._demand(server)
            heartbeat = m.Heartbeat(
                **STAMP,
                policy_version=self._version,
                num_groups=0,
                num_running=0,
                num_waiting=0,
                generated_tokens=0,
                failures={},
            )
            self._send(server, heartbeat)

    def _demand(self, server: str) -> None:
        share = -(-(_STALENESS + 1) * self._size.groups_per_step // self._size.servers)
        demand = m.Demand(
            **STAMP,
            num_groups=share,
            policy_version=self._version,
            heard_of_lease=self._newest[server],
            leases=self._open[server],
        )
        self._send(server, demand)

    def _finish(self, server: str, lease: m.Lease) -> None:
        for index in lease.sample_indices:
            facts = example_facts(
                group=lease.group,
                sample_index=index,
                server=server,
                kind=lease.kind,
                attempt=lease.attempt,
                incarnation=1,
                is_greedy=index in lease.greedy_indices,
                reward=float(index % 2),
                reward_parts={"exact_match": float(index % 2)},
                num_tokens=_TOKENS,
                num_prompt_tokens=_PROMPT,
                version_spans=[VersionSpan(_PROMPT, _TOKENS, self._version)],
            )
            self._send(server, m.TrajectoryDone(**STAMP, facts=facts), Trajectory(facts, *_ARRAYS).to_buffers())
            self._num_sent += 1

    def _send(self, peer: str, message: m.Message, buffers: Any = ()) -> None:
        self._of[peer].send_multipart(encode(message, list(buffers)))


_WRITTEN = np.arange(_TOKENS) >= _PROMPT
_ARRAYS = (
    np.arange(_TOKENS, dtype=np.int32) % 100,
    np.where(_WRITTEN, -0.5, 0.0).astype(np.float32),
    _WRITTEN.astype(np.uint8),
)


def _plan(seed: int) -> float:
    """Return the CPU seconds of planning a step."""
    draw = Random(seed)
    groups, lengths, prompts = [], [], []
    for first in range(0, 32_768, 8):
        prompts.append(draw.randint(64, 2000))
        groups.append(list(range(first, first + 8)))
        lengths += [prompts[-1] + int(min(8000, draw.lognormvariate(6.0, 1.0))) for _ in range(8)]
    begun = time.process_time()
    plan = plan_groups(groups, lengths, prompts, 64, 32_768)
    seconds = time.process_time() - begun
    assert sorted(index for rank in plan for part in rank for index in part) == list(range(32_768))
    print(f"planning 32,768 samples for 64 ranks: {seconds:.3f} s")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
