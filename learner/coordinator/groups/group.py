"""A group on its way: which samples of a prompt are out, which are back, which failed and how often."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from learner.coordinator.groups.kept_turns import KeptTurns, fitting
from learner.data.prompts import Prompt
from protocol.wire.messages import Lease
from protocol.wire.trajectory import Trajectory, TrajectoryFacts

MAX_ATTEMPTS = 3
# A server's death says little about the many samples that it held. After this many a group is suspect: it goes out
# where no other suspect is, and further deaths count against it only where it was the only one.
SUSPECT_DEATHS = 2
MAX_SERVER_DEATHS = 5
DIED = "server"


class LeaseId(NamedTuple):
    """Which lease of a group a result is of; later ones are larger."""

    incarnation: int  # the start of the run that gave it out
    attempt: int  # how many leases of the group there had been then, this one included


_NO_LEASE = LeaseId(0, 0)


class SentLease(NamedTuple):
    """The newest lease of a group that a server was sent."""

    number: int  # among all leases of this start
    attempt: int  # among the leases of the group


@dataclass(eq=False)
class Group:
    """The samples of one prompt."""

    name: str  # a `GroupName`, as text
    prompt: Prompt  # the data set's row that its samples start from
    kind: Literal["train", "eval"]  # eval: held-out, scored and never trained
    epoch: int  # pass over the data that it belongs to, -1 for an evaluation
    position: int  # place in the prompt order, -1 for an evaluation
    num_samples: int  # trajectories that make it whole
    greedy_indices: frozenset[int] = frozenset()  # samples drawn without randomness
    temperature: float | None = None  # of its samples; None: rollout.temperature
    attempt: int = 0  # leases of this group so far, in earlier starts too
    restarted_at: LeaseId = _NO_LEASE  # results of this lease and earlier ones are ignored: it was begun again
    oldest_version: int = 0  # oldest policy version among finished samples and the servers that still sample
    holders: dict[int, str] = field(default_factory=dict)  # sample -> the server that makes it
    attempts: dict[int, int] = field(default_factory=dict)  # sample -> attempt of its newest lease
    leases: dict[str, SentLease] = field(default_factory=dict)  # server -> its newest lease of this group
    leased_at: float = 0.0  # when the newest lease went out, monotonic seconds
    is_leased_twice: bool = False  # the newest lease was overdue and has gone out a second time
    kept_because: str | None = None  # why it is trained in spite of its mean score; None: the score is in bounds
    trajectories: dict[int, Trajectory] = field(default_factory=dict)  # sample -> what came back of it
    kept: dict[int, KeptTurns] = field(default_factory=dict)  # sample that is not back -> its finished turns
    # sample -> (boundary, detail) of each failure, in order, in earlier starts too. Deaths since it last got on
    failures: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    failed_on: set[str] = field(default_factory=set)  # servers that live and failed a sample of it, in this start
    # sample -> most turns that were kept of it when a server died: it gets on once it has more
    turns_at_deaths: dict[int, int] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return len(self.trajectories) == self.num_samples

    @property
    def is_begun(self) -> bool:
        """False while no sample is out or back: the group has no age yet."""
        return bool(self.holders or self.trajectories)

    @property
    def missing(self) -> list[int]:
        """Samples that nobody holds and that are not back."""
        return [i for i in range(self.num_samples) if i not in self.trajectories and i not in self.holders]

    @property
    def is_suspect(self) -> bool:
        """Return whether so many servers died with samples of this group that it may be what ends them."""
        return any(_num_deaths(failures) >= SUSPECT_DEATHS for failures in self.failures.values())

    @property
    def dead_letter(self) -> str | None:
        """Why this group is given up, or None: a sample failed MAX_ATTEMPTS times, or MAX_SERVER_DEATHS servers died
        while they made it."""
        for index, failures in self.failures.items():
            deaths = _num_deaths(failures)
            if deaths >= MAX_SERVER_DEATHS or len(failures) - deaths >= MAX_ATTEMPTS:
                return f"sample {index}: " + "; ".join(f"{boundary}: {detail}" for boundary, detail in failures)
        return None

    def lease_to(
        self, server: str, server_version: int, now: float, number: int, run_id: str, incarnation: int, seed: int
    ) -> Lease:
        """Return the lease of every missing sample, now held by `server`. number: of the lease, in this start."""
        indices = self.missing
        self.attempt += 1
        self.leased_at = now
        self.leases[server] = SentLease(number, self.attempt)
        resumed = fitting({i: self.kept[i] for i in indices if i in self.kept})
        # A group of which nothing is left is as young as its new server. Were the version of its first lease kept, a
        # group dropped as too old, or recalled after a restart, would be too old again at once, for ever.
        oldest = min([server_version, *(self.kept[i].oldest_version for i in resumed)])
        self.oldest_version = min(self.oldest_version, oldest) if self.is_begun else oldest
        self.holders.update(dict.fromkeys(indices, server))
        self.attempts.update(dict.fromkeys(indices, self.attempt))
        return Lease(
            run_id=run_id,
            incarnation=incarnation,
            number=number,
            group=self.name,
            attempt=self.attempt,
            kind=self.kind,
            prompt=self.prompt.prompt,
            label=self.prompt.label,
            columns=self.prompt.columns,
            sample_indices=indices,
            greedy_indices=[i for i in indices if i in self.greedy_indices],
            seed=seed,
            temperature=msgspec.UNSET if self.temperature is None else self.temperature,
            resumed=[self.kept[i].part for i in resumed] or msgspec.UNSET,
        )

    def receive(self, trajectory: Trajectory) -> bool:
        """Keep a trajectory; False when this sample is back already (the first valid one wins) or was given up."""
        facts = trajectory.facts
        index = facts.sample_index
        if index in self.trajectories or LeaseId(facts.incarnation, facts.attempt) <= self.restarted_at:
            return False
        self.oldest_version = min(self.oldest_version, facts.oldest_version) if self.is_begun else facts.oldest_version
        self.holders.pop(index, None)
        self.kept.pop(index, None)
        self.trajectories[index] = trajectory
        if self.is_ready:
            self.oldest_version = min(t.facts.oldest_version for t in self.trajectories.values())
        return True

    def fail(self, index: int, boundary: str, detail: str) -> KeptTurns | None:
        """Note that a sample failed for good on its server; it is missing again. boundary: who failed it.

        Returns turns that were kept of it and are not gone on from.
        """
        server = self.holders.pop(index, None)
        if server is not None and boundary != DIED:  # one that died is another process when it comes back
            self.failed_on.add(server)
        return self.note_failure(index, boundary, detail)

    def note_failure(self, index: int, boundary: str, detail: str) -> KeptTurns | None:
        """Note that a sample failed once, whoever makes it now; returns as `fail` does.

        After a failure it begins anew, because what was said may be why. A server's death says little; before it is
        given up for deaths, it begins anew once.
        """
        failures = self.failures.setdefault(index, [])
        failures.append((boundary, detail))
        if boundary == DIED and (kept := self.kept.get(index)) is not None:
            self.turns_at_deaths[index] = max(self.turns_at_deaths.get(index, 0), len(kept.part.turns))
        if boundary == DIED and _num_deaths(failures) != MAX_SERVER_DEATHS - 1:
            return None
        return self.kept.pop(index, None)

    def makes(self, index: int, server: str, attempt: int) -> bool:
        """Return whether a sample that is not back was leased to this server last: its turns are worth keeping."""
        is_newest = self.attempts.get(index) == attempt and self.holders.get(index, server) == server
        return is_newest and index not in self.trajectories

    def forget_deaths(self, index: int) -> bool:
        """Take servers' deaths from a sample that got further than at any of them; returns whether there were any.

        One that begins anew comes through the same turns again: were the deaths behind them forgotten there, a turn
        that ends every server would end servers for ever.
        """
        if len(self.kept[index].part.turns) <= self.turns_at_deaths.get(index, 0):
            return False
        failures = self.failures.get(index, [])
        others = [failure for failure in failures if failure[0] != DIED]
        if len(others) == len(failures):
            return False
        self.failures[index] = others
        return True

    def contradiction(self, facts: TrajectoryFacts, server: str) -> str | None:
        """Return what in these facts is not what was leased to `server`, or None."""
        if facts.sample_index >= self.num_samples:
            return f"sample_index is {facts.sample_index}, the group has {self.num_samples} samples"
        leased = {"server": server, "kind": self.kind, "is_greedy": facts.sample_index in self.greedy_indices}
        for name, expected in leased.items():
            if (value := getattr(facts, name)) != expected:
                return f"{name} is {value!r}, leased was {expected!r}"
        return None

    def is_leased(self, index: int, server: str, attempt: int) -> bool:
        """Return whether a server makes this sample by a lease of this attempt: what it says of others is history."""
        return self.holders.get(index) == server and self.attempts[index] == attempt

    def held_by(self, server: str) -> list[int]:
        """Return the samples that a server is making."""
        return [index for index, holder in self.holders.items() if holder == server]

    def take_back_from(self, server: str) -> list[int]:
        """Make the samples that `server` holds missing again; returns them."""
        lost = self.held_by(server)
        for index in lost:
            del self.holders[index]
        return lost

    def restart(self, incarnation: int) -> None:
        """Forget every sample: the group is made again from its prompt, whatever still comes from earlier leases."""
        self.restarted_at = LeaseId(incarnation, self.attempt)
        self.holders.clear()
        self.kept.clear()
        self.trajectories.clear()

    def equal_rewards(self) -> bool:
        rewards = [t.facts.reward for t in self.trajectories.values()]
        return max(rewards) - min(rewards) < 1e-8


def _num_deaths(failures: list[tuple[str, str]]) -> int:
    return sum(boundary == DIED for boundary, _ in failures)
