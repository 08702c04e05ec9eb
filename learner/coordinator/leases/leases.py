"""Leases going out to servers, and what servers bring of them: trajectories to keep, refuse or pass over, failures.

The groups lie in `learner.coordinator.groups.open_groups`; `learner.coordinator.leases.recall` sees to leases that do
not come back.
"""

from collections import Counter
from typing import Literal

from learner.coordinator.groups.group import Group
from learner.coordinator.groups.open_groups import GroupBook
from learner.coordinator.leases.overdue import LeaseClock
from learner.coordinator.leases.servers import ServerBook
from learner.coordinator.mailbox import Mailbox
from learner.ledger.ledger import Ledger
from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory, TrajectoryFacts


class LeaseBook:
    """Numbers this start's leases; each carries `seed`, the run's."""

    def __init__(
        self,
        groups: GroupBook,
        servers: ServerBook,
        clock: LeaseClock,
        ledger: Ledger,
        mailbox: Mailbox,
        counts: Counter[str],
        seed: int,
        vocab_size: int | None,
    ) -> None:
        """vocab_size: of the policy; None: any token is taken."""
        self._num_leases = 0
        self._groups = groups
        self._servers = servers
        self._clock = clock
        self._ledger = ledger
        self._mailbox = mailbox
        self._counts = counts
        self._seed = seed
        self._vocab_size = vocab_size

    # -- out ----------------------------------------------------------------------------------------------------------

    def lease_all(self, versions: range, is_admitting: bool, now: float) -> None:
        """Lease what there is to servers that want groups and hold weights of one of these versions.

        is_admitting: whether prompts that were never out may go out, besides those that came back.
        """
        while (server := self._servers.next_to_lease(versions)) is not None:
            group = self._groups.next_group(is_admitting)
            if group is None:
                return
            self.lease(group, server, now)

    def lease(self, group: Group, server: str, now: float) -> None:
        """Send a server that wants a group the missing samples of this one."""
        version = self._servers.take_wish(server)
        run_id, incarnation = self._mailbox.run_id, self._mailbox.incarnation
        self._num_leases += 1
        lease = group.lease_to(server, version, now, self._num_leases, run_id, incarnation, self._seed)
        self._servers.note_lease(server, self._num_leases)
        if group.kind == "train":
            self._ledger.lease(group.name, group.epoch, group.prompt.uid, group.position, server, group.attempt)
        self._mailbox.send(server, lease)

    # -- back ---------------------------------------------------------------------------------------------------------

    def receive(self, server: str, facts: TrajectoryFacts, buffers: list[bytes], versions: range, now: float) -> None:
        """Keep a trajectory if it is what was leased and of weights that exist; its server hears what became of it."""
        group = self._groups.find(facts.group)
        if group is None or self._is_of_lost_weights(facts):
            self._pass_over(server, facts, "unknown" if group is None else "lineage")
            return
        try:
            trajectory = Trajectory.from_buffers(facts, buffers, "$.facts")
            _check_lease(group, facts, server, versions)
            _check_vocabulary(trajectory, self._vocab_size)
        except FrameError as error:
            self._reject(group, facts, server, error)
            return
        if not group.receive(trajectory):
            self._pass_over(server, facts, "duplicate")
            return
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "accepted")
        self._ledger.add_trajectory(facts, facts.incarnation)
        if group.is_ready:
            if group.attempt == 1:
                self._clock.note(now - group.leased_at)
            self._groups.note_ready(group)

    def _is_of_lost_weights(self, facts: TrajectoryFacts) -> bool:
        """Return whether a trajectory of an earlier start holds tokens of steps that its checkpoint did not have."""
        if facts.incarnation == self._mailbox.incarnation:
            return False
        newest = self._ledger.newest_valid_version(facts.incarnation)
        return newest is None or facts.newest_version > newest

    def _pass_over(self, server: str, facts: TrajectoryFacts, why: str) -> None:
        """Have a server forget a trajectory that is of no use: its sample is back already, or its weights are lost."""
        self._counts[f"unused:{why}"] += 1
        self._ledger.waste(facts.group, facts.sample_index, facts.attempt, why, facts.num_model_tokens)
        outcome: Literal["duplicate", "unknown"] = "duplicate" if why == "duplicate" else "unknown"
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, outcome)

    def _reject(self, group: Group, facts: TrajectoryFacts, server: str, error: FrameError) -> None:
        self._counts[f"rejected:{error.reason}"] += 1
        self._ledger.waste(facts.group, facts.sample_index, facts.attempt, "rejected", facts.num_model_tokens)
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "rejected", str(error))
        if group.is_held(facts.sample_index, server, facts.attempt):
            self._groups.fail(group, [facts.sample_index], server, "trajectory", f"refused: {error}")

    def receive_failure(self, server: str, message: m.SampleFailed) -> None:
        """Note that a neighbour of the server failed one sample of a lease: it goes out again, or is given up."""
        self._mailbox.acknowledge(server, message.group, message.sample_index, "returned")
        group = self._groups.find(message.group)
        if group is not None and group.is_held(message.sample_index, server, message.attempt):
            self._counts[f"failed:{message.boundary}"] += 1
            if message.num_model_tokens:
                self._ledger.waste(
                    group.name, message.sample_index, message.attempt, "failed", message.num_model_tokens
                )
            self._groups.fail(group, [message.sample_index], server, message.boundary, message.detail)


def _check_lease(group: Group, facts: TrajectoryFacts, server: str, versions: range) -> None:
    """Raise FrameError when a trajectory is not what its server was asked for, or of weights that do not exist."""
    if (problem := group.contradiction(facts, server)) is not None:
        raise FrameError("$.facts", problem, "lease")
    if facts.newest_version > versions[-1]:
        problem = f"has version {facts.newest_version}, the learner is at {versions[0]}"
        raise FrameError("$.facts.version_spans", problem, "version")


def _check_vocabulary(trajectory: Trajectory, vocab_size: int | None) -> None:
    """Raise FrameError for a token that the policy does not know: its embedding has no such row, and a rank that looks
    it up dies (on a GPU with "device-side assert triggered", which names neither token nor sample)."""
    if vocab_size is not None and (highest := int(trajectory.tokens.max())) >= vocab_size:
        problem = f"holds the token {highest}, the policy's vocabulary has {vocab_size}"
        raise FrameError("$.facts.tokens", problem, "vocabulary")
