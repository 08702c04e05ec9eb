"""CPU milliseconds that one turn of the coordinator takes in a large run whose ranks wait for their samples.

    python -m tests.benchmarks.coordinator_turn [--seed N] [--short]

No sockets: messages go straight into the coordinator with its ledger. The loop turns every 50 ms or sooner, so one turn
takes in a twentieth of what servers and ranks send in a second: each server a demand that names its leases, and a
heartbeat; each rank a question. Runs are drawn between 1 and 64 ranks, 1 and 512 servers and windows of 80 to 5,120
groups; the largest is always among them. Groups have 8 samples; none is back. It is the thread's CPU time: other work
beside it does not count. holds: the median turn of every run took less than 20 ms.
"""

import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from tests.chaos.rig.verdict import conclude, options

TARGET_MS = 20.0
_TURNS_PER_S = 20
_STALENESS = 4


@dataclass(frozen=True)
class Size:
    ranks: int
    servers: int
    groups_per_step: int

    @property
    def window(self) -> int:
        return (_STALENESS + 1) * self.groups_per_step


def main() -> int:
    chosen = options(__doc__)
    random = Random(chosen.seed)
    sizes = [Size(64, 512, 1024)]
    for _ in range(1 if chosen.short else 6):
        ranks = random.choice((1, 8, 32, 64))
        sizes.append(Size(ranks, random.choice((1, 8, 64, 512)), max(ranks, 2 ** random.randint(4, 10))))
    medians = []
    for size in sizes:
        turns = measure(size, num_turns=20 if chosen.short else 60)
        medians.append(statistics.median(turns))
        print(
            f"{size.ranks:3d} ranks, {size.servers:4d} servers, window of {size.window:5d} groups: "
            f"median {medians[-1]:6.2f} ms, slowest {max(turns):6.2f} ms",
            flush=True,
        )
    return conclude(
        "coordinator_turn",
        max(medians) < TARGET_MS,
        seed=chosen.seed,
        runs=len(sizes),
        largest_ms=medians[0],
        slowest_median_ms=max(medians),
    )


def measure(size: Size, num_turns: int) -> list[float]:
    """Return how long each turn took, in milliseconds, while every group of the window is out."""
    learner = {"groups_per_step": size.groups_per_step, "max_staleness": _STALENESS, "num_ranks": size.ranks}
    settings = Settings.model_validate(
        {"run": {"max_steps": 100}, "rollout": {"group_size": 8, "lease_timeout_s": 1800}, "learner": learner}
    )
    prompts = [Prompt(f"p{i}", f"question {i}", f"answer {i}", {}) for i in range(size.window)]
    with tempfile.TemporaryDirectory() as folder, closing(Ledger(Path(folder) / "ledger.sqlite")) as ledger:
        coordinator = Coordinator(settings, "r1", ledger, prompts, [], RunRecord(Path(folder), 0), 0)
        peers = Peers(coordinator, size)
        peers.take_leases()
        return [peers.turn(number) for number in range(num_turns)]


class Peers:
    """Servers with all their groups at work, and ranks that ask."""

    def __init__(self, coordinator: Coordinator, size: Size) -> None:
        self._coordinator = coordinator
        self._size = size
        self._stamp: dict[str, Any] = {"run_id": "r1", "incarnation": coordinator.incarnation}
        self._here: dict[str, dict[str, int]] = {f"s{i}": {} for i in range(size.servers)}
        self._newest: dict[str, int] = dict.fromkeys(self._here, 0)

    def take_leases(self) -> None:
        """Have all groups of the window leased, spread over the servers."""
        each = -(-self._size.window // self._size.servers)
        for server in self._here:
            self._coordinator.receive(server, self._demand(server, each), [], 0.0)
        self._coordinator.advance(0.0)
        while self._coordinator.has_more_to_do:
            self._coordinator.advance(0.0)
        for server, message, _ in self._coordinator.take_outgoing():
            if isinstance(message, m.Lease):
                self._here[server][message.group] = message.attempt
                self._newest[server] = message.number
        assert sum(len(groups) for groups in self._here.values()) == self._size.window

    def turn(self, number: int) -> float:
        """Send what comes in a twentieth of a second, and return what the coordinator needed for it, in ms."""
        now = number / _TURNS_PER_S
        messages: list[tuple[str, m.Message]] = []
        for place, server in enumerate(self._here):
            if place % _TURNS_PER_S == number % _TURNS_PER_S:
                messages += [(server, self._demand(server, 0)), (server, self._heartbeat(server))]
        for rank in range(self._size.ranks):
            # An answer comes after a second: then the rank asks again, at once.
            if number == 0 or rank % _TURNS_PER_S == number % _TURNS_PER_S:
                messages.append((f"rank-{rank}", m.NextBatch(**self._stamp, step=1, rank=rank)))
        begun = time.thread_time()
        for peer, message in messages:
            self._coordinator.receive(peer, message, [], now)
        self._coordinator.advance(now)
        self._coordinator.take_outgoing()
        return 1000 * (time.thread_time() - begun)

    def _demand(self, server: str, num_groups: int) -> m.Demand:
        return m.Demand(
            **self._stamp,
            num_groups=num_groups,
            policy_version=0,
            heard_of_lease=self._newest[server],
            leases=self._here[server],
        )

    def _heartbeat(self, server: str) -> m.Heartbeat:
        return m.Heartbeat(
            **self._stamp,
            policy_version=0,
            num_groups=len(self._here[server]),
            num_running=8 * len(self._here[server]),
            num_waiting=0,
            generated_tokens=1_000_000,
            failures={},
        )


if __name__ == "__main__":
    sys.exit(main())
