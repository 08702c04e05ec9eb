"""A group: the samples of one prompt, from its first lease until a step trained it.

    PENDING   has samples to lease: new, failed, lost, too old, or recalled by a restart
    LEASED    servers make all its missing samples
    READY     all samples are back
    ASSIGNED  a step trains on it
    TRAINED   the step was applied (final)
    SKIPPED   filtered, failed too often, or its step was not applied (final)

An evaluation's group ends as READY or SKIPPED. The ledger stores the states' values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from learner.data.prompts import Prompt
from protocol.wire.conversation import ConversationPart
from protocol.wire.messages import Lease
from protocol.wire.trajectory import Trajectory, TrajectoryFacts

MAX_FAILURES = 3
MAX_SERVER_DEATHS = 5
# Boundary of a failure: the server died.
DIED = "server"


class GroupState(Enum):
    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"
    ASSIGNED = "assigned"
    TRAINED = "trained"
    SKIPPED = "skipped"


TRANSITIONS: dict[GroupState, tuple[GroupState, ...]] = {
    # READY: every sample came from leases of an earlier start.
    GroupState.PENDING: (GroupState.PENDING, GroupState.LEASED, GroupState.READY, GroupState.SKIPPED),
    # LEASED again: an overdue lease goes to a second server.
    GroupState.LEASED: (GroupState.PENDING, GroupState.LEASED, GroupState.READY, GroupState.SKIPPED),
    # PENDING: too old to train. SKIPPED: filtered.
    GroupState.READY: (GroupState.PENDING, GroupState.ASSIGNED, GroupState.SKIPPED),
    GroupState.ASSIGNED: (GroupState.TRAINED, GroupState.SKIPPED),
    GroupState.TRAINED: (),
    GroupState.SKIPPED: (),
}


class LeaseId(NamedTuple):
    """A group's lease; later ones are larger."""

    incarnation: int  # start of the run
    attempt: int  # number within the group


_NO_LEASE = LeaseId(0, 0)


class SentLease(NamedTuple):
    """A group's newest lease on a server."""

    number: int  # number among all leases of this start
    attempt: int  # number within the group


class LeaseStamp(NamedTuple):
    """Lease fields that do not depend on the group."""

    run_id: str
    incarnation: int
    seed: int
    number: int  # number among all leases of this start


@dataclass(eq=False)
class Group:
    """The samples of one prompt."""

    name: str  # a `GroupName`, as text
    prompt: Prompt
    kind: Literal["train", "eval"]  # eval: scored, never trained
    epoch: int  # pass over the data; -1 for an evaluation
    position: int  # place in the prompt order; -1 for an evaluation
    num_samples: int  # trajectories of a whole group
    greedy_indices: frozenset[int] = frozenset()  # samples without randomness
    temperature: float | None = None  # None: rollout.temperature
    state: GroupState = GroupState.PENDING
    attempt: int = 0  # leases so far, in earlier starts too
    restarted_at: LeaseId = _NO_LEASE  # last lease before a restart; results up to it are ignored
    oldest_version: int = 0  # oldest policy version among finished samples and servers that are still sampling
    holders: dict[int, str] = field(default_factory=dict)  # sample -> server that makes it
    attempts: dict[int, int] = field(default_factory=dict)  # sample -> attempt of its newest lease
    leases: dict[str, SentLease] = field(default_factory=dict)  # server -> its newest lease
    leased_at: float = 0.0  # time of the newest lease, monotonic seconds
    is_leased_twice: bool = False  # an overdue lease went to a second server
    kept_because: str | None = None  # reason to train despite a mean score out of bounds
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # sample -> its first valid result
    # sample -> (boundary, detail) of each failure, in earlier starts too
    failures: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    failed_on: set[str] = field(default_factory=set)  # running servers on which a sample failed in this start

    @property
    def is_ready(self) -> bool:
        return len(self.trajectories) == self.num_samples

    @property
    def is_begun(self) -> bool:
        """False while no sample is out or back."""
        return bool(self.holders or self.trajectories)

    @property
    def missing(self) -> list[int]:
        """Samples that are neither back nor held."""
        return [i for i in range(self.num_samples) if i not in self.trajectories and i not in self.holders]

    @property
    def dead_letter(self) -> str | None:
        """Why the prompt is skipped: a sample failed MAX_FAILURES times, or MAX_SERVER_DEATHS servers died with it."""
        for index, failures in self.failures.items():
            num_deaths = [boundary for boundary, _ in failures].count(DIED)
            if num_deaths >= MAX_SERVER_DEATHS or len(failures) - num_deaths >= MAX_FAILURES:
                return f"sample {index}: " + "; ".join(f"{boundary}: {detail}" for boundary, detail in failures)
        return None

    def move_to(self, state: GroupState) -> None:
        """Change the state. Raises: ValueError for a change outside TRANSITIONS."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"group {self.name} cannot become {state.value}: it is {self.state.value}")
        self.state = state

    def lease_to(
        self, server: str, server_version: int, now: float, stamp: LeaseStamp, resumed: Sequence[ConversationPart] = ()
    ) -> Lease:
        """Return the lease of every missing sample, now held by `server`.

        resumed: finished turns from which samples continue.
        """
        indices = self.missing
        self.move_to(GroupState.LEASED)
        self.attempt += 1
        self.leased_at = now
        self.leases[server] = SentLease(stamp.number, self.attempt)
        # Without samples the group takes its new server's version. With that of its first lease, a dropped or recalled
        # group would be too old again at once, for ever.
        oldest = min([server_version, *(span.version for part in resumed for span in part.version_spans)])
        self.oldest_version = min(self.oldest_version, oldest) if self.is_begun else oldest
        self.holders.update(dict.fromkeys(indices, server))
        self.attempts.update(dict.fromkeys(indices, self.attempt))
        return Lease(
            run_id=stamp.run_id,
            incarnation=stamp.incarnation,
            number=stamp.number,
            group=self.name,
            attempt=self.attempt,
            kind=self.kind,
            prompt=self.prompt.prompt,
            label=self.prompt.label,
            columns=self.prompt.columns,
            sample_indices=indices,
            greedy_indices=[i for i in indices if i in self.greedy_indices],
            seed=stamp.seed,
            temperature=msgspec.UNSET if self.temperature is None else self.temperature,
            resumed=list(resumed) or msgspec.UNSET,
        )

    def receive(self, trajectory: Trajectory) -> bool:
        """Keep a trajectory; False when its sample is already back (the first valid one wins) or was restarted."""
        facts = trajectory.facts
        index = facts.sample_index
        if index in self.trajectories or LeaseId(facts.incarnation, facts.attempt) <= self.restarted_at:
            return False
        oldest = facts.oldest_version
        self.oldest_version = min(self.oldest_version, oldest) if self.is_begun else oldest
        self.holders.pop(index, None)
        self.trajectories[index] = trajectory
        if self.is_ready:
            self.oldest_version = min([t.facts.oldest_version for t in self.trajectories.values()])
        return True

    def fail(self, index: int, server: str, boundary: str, detail: str) -> bool:
        """Record a sample's failure; returns whether `server` still held it."""
        self.failures.setdefault(index, []).append((boundary, detail))
        if self.holders.get(index) != server:
            return False
        del self.holders[index]
        if boundary != DIED:  # a restarted server is another process
            self.failed_on.add(server)
        return True

    def contradiction(self, facts: TrajectoryFacts, server: str) -> str | None:
        """Return how these facts differ from the lease of `server`, or None."""
        if facts.sample_index >= self.num_samples:
            return f"sample_index is {facts.sample_index}, the group has {self.num_samples} samples"
        leased = {"server": server, "kind": self.kind, "is_greedy": facts.sample_index in self.greedy_indices}
        for name, expected in leased.items():
            if (value := getattr(facts, name)) != expected:
                return f"{name} is {value!r}, leased was {expected!r}"
        return None

    def is_leased(self, index: int, server: str, attempt: int) -> bool:
        """Return whether a server makes this sample by this attempt's lease."""
        return self.holders.get(index) == server and self.attempts[index] == attempt

    def held_by(self, server: str) -> list[int]:
        return [index for index, holder in self.holders.items() if holder == server]

    def take_back_from(self, server: str) -> list[int]:
        """Make the samples that `server` holds missing again; returns them."""
        lost = self.held_by(server)
        for index in lost:
            del self.holders[index]
        return lost

    def restart(self, incarnation: int) -> None:
        """Drop every sample; results of earlier leases are ignored."""
        self.restarted_at = LeaseId(incarnation, self.attempt)
        self.holders.clear()
        self.trajectories.clear()

    def in_order(self) -> list[Trajectory]:
        return [self.trajectories[index] for index in sorted(self.trajectories)]

    def equal_rewards(self) -> bool:
        rewards = [t.facts.reward for t in self.trajectories.values()]
        return max(rewards) - min(rewards) < 1e-8


def mean_score(scores: Sequence[float]) -> float:
    """Return the mean of a group's scores, in the order of its samples; exactly r when all are r."""
    return min(max(math.fsum(scores) / len(scores), min(scores)), max(scores))
