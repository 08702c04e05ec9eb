"""Trajectories of 8,192 tokens (74 kB) that one coordinator takes in each second, encrypted and fully checked.

    python -m tests.benchmarks.ingest [--seed N] [--short] [--trajectories N] [--profile PATH]

Four rollout servers in another process answer their leases with finished trajectories, at most 32 each unacknowledged.
The coordinator is the real one: CURVE, decoder, seal, `Trajectory.from_buffers`, `Leases`, a row in the ledger, an
acknowledgement. Every trajectory is another one, and all must be accepted. Timed from the first one sent to the last
one acknowledged, in several rounds with a new coordinator each. CPU milliseconds are those of the coordinator's
process, of its loop's thread alone, and of the senders. `--profile` writes cProfile's figures (CPU time) of the loop's
thread for the last round. holds: the median round took in at least 1,000 a second.
"""

import cProfile
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from learner.coordinator.coordinator import Coordinator
from protocol.wire import messages as m
from protocol.wire.codec import Decoder, encode
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, VersionSpan
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.running_coordinator import STAMP, Place, RunningCoordinator, running_coordinator
from tests.protocol.wire.examples import example_facts

TARGET_PER_S = 1000.0
NUM_TOKENS = 8192
_NUM_SERVERS = 4
_GROUP_SIZE = 8
_MAX_UNACKED = 32
_GIVE_UP_S = 120.0


@dataclass(frozen=True)
class Round:
    """per_s: trajectories accepted a second. The rest: CPU milliseconds for each of them."""

    per_s: float
    coordinator_ms: float
    loop_ms: float
    senders_ms: float


def main() -> int:
    chosen = options(__doc__, trajectories=0, profile="")
    num = chosen.trajectories or (1_024 if chosen.short else 4_096)
    if num % (_NUM_SERVERS * _GROUP_SIZE):
        raise SystemExit(f"--trajectories {num} is no multiple of {_NUM_SERVERS * _GROUP_SIZE}. Use one that is.")
    rounds = []
    with get_context("spawn").Pool(1) as senders:
        for left in reversed(range(3 if chosen.short else 7)):
            rounds.append(measure(senders, num, chosen.seed, "" if left else chosen.profile))
            print(f"{num} trajectories: {rounds[-1]}", flush=True)
    medians = {
        name: statistics.median(getattr(one, name) for one in rounds) for name in ("per_s", *Round.__annotations__)
    }
    return conclude("ingest", medians["per_s"] >= TARGET_PER_S, **medians, slowest_per_s=min(r.per_s for r in rounds))


def measure(senders: Pool, num: int, seed: int, profile: str) -> Round:
    """Return the figures of one round with a new coordinator."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 1},
        "rollout": {"group_size": _GROUP_SIZE},
        "learner": {"groups_per_step": num // _GROUP_SIZE, "max_staleness": 0},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        running_coordinator(Path(folder), settings, num_prompts=num // _GROUP_SIZE) as run,
    ):
        profiler = cProfile.Profile(time.thread_time)
        if profile:
            do_in_loop(run, lambda _: profiler.enable())
        cpu_s, loop_s = time.process_time(), loop_cpu_s(run)
        seconds, senders_s = senders.apply(send_all, (run.place, num, seed))
        cpu_s, loop_s = time.process_time() - cpu_s, loop_cpu_s(run) - loop_s
        if profile:
            do_in_loop(run, lambda _: profiler.disable())
            profiler.dump_stats(profile)
        rows = run.ledger._db.execute("SELECT count(*) FROM trajectories").fetchone()[0]
        assert rows == num, f"{rows} rows for {num} trajectories"
    return Round(num / seconds, cpu_s / num * 1000, loop_s / num * 1000, senders_s / num * 1000)


def loop_cpu_s(run: RunningCoordinator) -> float:
    """Return the CPU seconds that the coordinator's thread has used."""
    answer: list[float] = []
    do_in_loop(run, lambda _: answer.append(time.thread_time()))
    return answer[0]


def do_in_loop(run: RunningCoordinator, command: Callable[[Coordinator], None]) -> None:
    """Have something done by the coordinator's thread, and wait for it."""
    is_done = threading.Event()
    run.loop.submit(lambda coordinator: (command(coordinator), is_done.set())[1])
    if not is_done.wait(_GIVE_UP_S):
        raise TimeoutError(f"the coordinator's thread did not answer within {_GIVE_UP_S:g} s")


# -- the servers, in a process of their own ---------------------------------------------------------------------------


class Server:
    """A rollout server whose engine is done before it is asked."""

    def __init__(self, place: Place, context: "zmq.Context[Any]", name: str, num_groups: int, arrays: "Arrays") -> None:
        self.socket = place.connect(context, name)
        self.num_unacked = 0
        self.num_accepted = 0
        self.samples: deque[tuple[m.Lease, int]] = deque()
        self._name = name
        self._arrays = arrays
        self._decoder: Decoder[m.Message] = Decoder(m.ToServer | m.Done)
        self.socket.send_multipart(encode(m.Hello(**STAMP, server=name, policy_version=0)))
        demand = m.Demand(**STAMP, num_groups=num_groups, policy_version=0, heard_of_lease=0, leases={})
        self.socket.send_multipart(encode(demand))

    def receive(self) -> None:
        message, _ = self._decoder.decode(self.socket.recv_multipart())
        if isinstance(message, m.Lease):
            self.samples += [(message, index) for index in message.sample_indices]
        elif isinstance(message, m.Ack):
            assert message.outcome == "accepted", message
            self.num_unacked -= 1
            self.num_accepted += 1

    def send(self) -> None:
        while self.samples and self.num_unacked < _MAX_UNACKED:
            lease, index = self.samples.popleft()
            facts, buffers = self._arrays.trajectory(lease, index, self._name)
            self.socket.send_multipart(encode(m.TrajectoryDone(**STAMP, facts=facts), buffers), copy=False)
            self.num_unacked += 1


class Arrays:
    """Trajectories of four turns: made once, with another first token and other facts each time."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        spans = [VersionSpan(start, start + 1500, 0) for start in range(100, NUM_TOKENS - 1500, 2000)]
        mask = np.zeros(NUM_TOKENS, np.uint8)
        for span in spans:
            mask[span.start : span.end] = 1
        self._tokens = random.integers(0, 150_000, NUM_TOKENS).astype(np.int32)
        self._logprobs = (-random.random(NUM_TOKENS) * mask).astype(np.float32)
        self._mask = mask
        self._count = 0
        self._facts = example_facts(
            incarnation=1,
            num_tokens=NUM_TOKENS,
            num_prompt_tokens=100,
            num_turns=len(spans),
            version_spans=spans,
            started_at=1.7e9,
            finished_at=1.7e9,
            generate_s=3.0,
        )

    def trajectory(self, lease: m.Lease, index: int, server: str) -> tuple[TrajectoryFacts, list[bytes]]:
        """Return the facts and buffers of the next trajectory."""
        self._count += 1
        self._tokens[0] = self._count
        facts = msgspec.structs.replace(self._facts, group=lease.group, sample_index=index, server=server)
        return facts, Trajectory(facts, self._tokens, self._logprobs, self._mask).to_buffers()


def send_all(place: Place, num: int, seed: int) -> tuple[float, float]:
    """Have servers lease and deliver `num` trajectories; returns (seconds, CPU seconds of this process)."""
    arrays = Arrays(seed)
    with zmq.Context() as context:
        share = num // _GROUP_SIZE // _NUM_SERVERS
        servers = {}
        poller = zmq.Poller()
        for i in range(_NUM_SERVERS):
            server = Server(place, context, f"s{i}", share, arrays)
            servers[server.socket] = server
            poller.register(server.socket, zmq.POLLIN)
        receive_until(poller, servers, lambda: sum(len(s.samples) for s in servers.values()) == num)
        started, cpu_started = time.monotonic(), time.process_time()
        for server in servers.values():
            server.send()
        receive_until(poller, servers, lambda: sum(s.num_accepted for s in servers.values()) == num)
        seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu_started
        for socket in servers:
            socket.close()
    return seconds, cpu_s


def receive_until(poller: zmq.Poller, servers: dict[Any, Server], is_done: Callable[[], bool]) -> None:
    is_sending = any(server.num_unacked for server in servers.values())
    deadline = time.monotonic() + _GIVE_UP_S
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done within {_GIVE_UP_S:g} s, process {os.getpid()}")
        for socket, _ in poller.poll(1000):
            servers[socket].receive()
            if is_sending:
                servers[socket].send()


if __name__ == "__main__":
    sys.exit(main())
