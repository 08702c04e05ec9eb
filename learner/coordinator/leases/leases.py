"""Leases going out to servers, and what servers bring of them: trajectories to keep, refuse or pass over, failures."""

import numpy as np
from numpy.typing import NDArray

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import Group
from learner.coordinator.groups.kept_turns import joined_buffers
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.leases.overdue import OverdueLimit
from learner.coordinator.leases.servers import Servers
from learner.ledger.ledger import REWARDS_SINCE_START
from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.refused_sample import SampleStamp
from protocol.wire.trajectory import Trajectory, TrajectoryFacts

# So long after its last lease a prompt that failed waits for a server on which it did not.
_ELSEWHERE_S = 30.0


class Leases:
    """Numbers this start's leases; each carries `seed`, the run's."""

    def __init__(
        self,
        groups: OpenGroups,
        servers: Servers,
        overdue: OverdueLimit,
        accounts: Accounts,
        seed: int,
        vocab_size: int | None,
    ) -> None:
        """vocab_size: of the policy; None: any token is taken."""
        self._num_leases = 0
        self._groups = groups
        self._servers = servers
        self._overdue = overdue
        self._ledger = accounts.ledger
        self._mailbox = accounts.mailbox
        self._tally = accounts.tally
        self._seed = seed
        self._vocab_size = vocab_size
        self._rewards_since = int(accounts.ledger.meta(REWARDS_SINCE_START) or 0)

    # -- out ----------------------------------------------------------------------------------------------------------

    def lease_all(self, versions: range, is_admitting: bool, now: float) -> None:
        """Lease what there is to servers that want groups and hold weights of one of these versions.

        is_admitting: whether prompts that were never out may go out, besides those that came back.
        """
        apart: list[Group] = []
        taken: set[str] | None = None  # servers that make samples of a suspect; known when the first suspect comes up
        while (server := self._servers.next_to_lease(versions)) is not None:
            group = self._groups.next_group(is_admitting)
            if group is None:
                break
            if group.is_suspect and taken is None:
                taken = self._groups.servers_of_suspects()
            apart_from = taken if group.is_suspect and taken is not None else set()
            if group.failed_on or apart_from:
                server = self._next_elsewhere(group, apart_from, versions, now)
                if server is None:
                    apart.append(group)
                    continue
            apart_from.add(server)
            self.lease(group, server, now)
        self._groups.put_back(apart)

    def lease(self, group: Group, server: str, now: float) -> None:
        """Send a server that wants a group the missing samples of this one."""
        self._num_leases += 1
        version = self._servers.reserve_slot(server, self._num_leases)
        lease = self._groups.lease(group, server, version, now, self._num_leases, self._seed)
        resumed = [group.kept[part.sample_index] for part in lease.resumed or ()]
        self._tally.resumed += len(resumed)
        self._mailbox.send(server, lease, joined_buffers(resumed))

    def _next_elsewhere(self, group: Group, apart_from: set[str], versions: range, now: float) -> str | None:
        """Return the server for a group that failed somewhere, or that has to be apart from these servers; None: none
        yet.

        A server whose every sample fails at once, for want of a package or a file, always has room: it would be leased
        the same prompts three times over, and have all of them given up. Another one that is busy is waited for, but
        not for ever: it may stand still.
        """
        server = self._servers.next_to_lease(versions, other_than=group.failed_on | apart_from)
        is_waiting = self._servers.able(versions) - group.failed_on and now - group.leased_at < _ELSEWHERE_S
        if server is not None or is_waiting:
            return server
        return self._servers.next_to_lease(versions, other_than=apart_from)

    # -- back ---------------------------------------------------------------------------------------------------------

    def receive(self, server: str, facts: TrajectoryFacts, buffers: list[bytes], versions: range, now: float) -> None:
        """Keep a trajectory if it is what was leased and of weights that exist; its server hears what became of it."""
        group = self._groups.find(facts.group)
        if (why := self._unusable_because(group, facts)) is not None:
            self._pass_over(server, facts, "unknown", why)
            return
        assert group is not None
        try:
            trajectory = Trajectory.from_buffers(facts, buffers, "$.facts")
            _check_lease(group, facts, server, versions)
            check_vocabulary(trajectory.tokens, self._vocab_size)
        except FrameError as error:
            self._reject(group, facts, server, error)
            return
        if not self._groups.accept(group, trajectory):
            self._pass_over(server, facts, "duplicate", "duplicate")
            return
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "accepted")
        if group.is_ready and group.attempt == 1:
            self._overdue.observe(now - group.leased_at)

    def _unusable_because(self, group: Group | None, facts: TrajectoryFacts) -> str | None:
        """Return why a trajectory cannot be used, as the ledger's waste names it: "unknown" group, lost weights
        ("lineage"), or rewards of other endpoints than this start's ("endpoints")."""
        if group is None:
            return "unknown"
        if self._is_of_lost_weights(facts):
            return "lineage"
        return "endpoints" if facts.incarnation < self._rewards_since else None

    def _is_of_lost_weights(self, facts: TrajectoryFacts) -> bool:
        """Return whether a trajectory of an earlier start holds tokens of steps that its checkpoint did not have."""
        if facts.incarnation == self._mailbox.incarnation:
            return False
        newest = self._ledger.last_shared_version(facts.incarnation)
        return newest is None or facts.newest_version > newest

    def _pass_over(self, server: str, facts: TrajectoryFacts, outcome: m.Outcome, why: str) -> None:
        """Have a server forget a trajectory that is of no use: its sample is back already, or its weights are lost."""
        self._tally.unused[why] += 1
        self._groups.waste(facts, why)
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, outcome)

    def refuse(self, server: str, sample: SampleStamp, error: FrameError) -> None:
        """Have a server forget a result that is no valid message, and would be none if it came again."""
        self._mailbox.acknowledge(server, sample.group, sample.sample_index, "refused", str(error))
        group = self._groups.find(sample.group)
        if group is not None and group.is_leased(sample.sample_index, server, sample.attempt):
            self._groups.fail(group, [sample.sample_index], server, "trajectory", f"refused: {error}")

    def _reject(self, group: Group, facts: TrajectoryFacts, server: str, error: FrameError) -> None:
        self._tally.rejected[error.reason] += 1
        self._groups.waste(facts, "rejected")
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "rejected", str(error))
        if group.is_leased(facts.sample_index, server, facts.attempt):
            self._groups.fail(group, [facts.sample_index], server, "trajectory", f"refused: {error}")

    def receive_failure(self, server: str, message: m.SampleFailed) -> None:
        """Note that a neighbour of the server failed one sample of a lease: it goes out again, or is given up."""
        self._mailbox.acknowledge(server, message.group, message.sample_index, "returned")
        group, index = self._groups.find(message.group), message.sample_index
        if group is not None and group.is_leased(index, server, message.attempt):
            self._tally.failed[message.boundary] += 1
            self._groups.waste_unfinished(group, index, message.attempt, message.num_model_tokens)
            self._groups.fail(group, [index], server, message.boundary, message.detail)


def _check_lease(group: Group, facts: TrajectoryFacts, server: str, versions: range) -> None:
    """Raise FrameError when a trajectory is not what its server was asked for, or of weights that do not exist."""
    if (problem := group.contradiction(facts, server)) is not None:
        raise FrameError("$.facts", problem, "lease")
    if facts.newest_version > versions[-1]:
        problem = f"has version {facts.newest_version}, the learner is at {versions[0]}"
        raise FrameError("$.facts.version_spans", problem, "version")


def check_vocabulary(tokens: NDArray[np.int32], vocab_size: int | None) -> None:
    """Raise FrameError for a token that the policy does not know: its embedding has no such row, and a rank that looks
    it up dies (on a GPU with "device-side assert triggered", which names neither token nor sample)."""
    if vocab_size is not None and (highest := int(tokens.max())) >= vocab_size:
        problem = f"holds the token {highest}, the policy's vocabulary has {vocab_size}"
        raise FrameError("$.facts.tokens", problem, "vocabulary")
