"""Leases: sent to servers, answered by results and failures, and recalled when they do not come back.

The missing samples of a recalled lease are leased again.
"""

from collections import deque
from collections.abc import Mapping

import msgspec

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import DIED, Group, GroupState, LeaseStamp, SentLease
from learner.coordinator.groups.kept_turns import KeptTurns, joined_buffers
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.servers import Servers
from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import SampleStamp
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, check_vocabulary

# Longest wait of a failed prompt for another server, since its last lease.
_ELSEWHERE_S = 30.0
# Largest number of groups that one turn of the loop leases; the next turn leases the others.
MOST_AT_ONCE = 64


class OverdueLimit:
    """The time after which a group is leased a second time, learned from how long groups take.

    Samples of the first lease still count, so long answers are not cut off.

    >>> limit = OverdueLimit(limit_s=600.0)
    >>> for seconds in range(32):
    ...     limit.observe(10.0 + seconds % 11)
    >>> limit.overdue_s
    80.0
    """

    _NUM_OBSERVED, _NUM_NEEDED = 256, 32
    _FACTOR, _AT_LEAST_S = 4.0, 30.0

    def __init__(self, limit_s: float) -> None:
        """limit_s: longest time of a lease, after which it counts as failed."""
        self.limit_s = limit_s
        self.overdue_s = limit_s
        self._durations: deque[float] = deque(maxlen=self._NUM_OBSERVED)

    def observe(self, duration_s: float) -> None:
        """Record the time from a group's lease to its last sample."""
        self._durations.append(duration_s)
        if len(self._durations) >= self._NUM_NEEDED:
            self.overdue_s = min(self.limit_s, max(self._AT_LEAST_S, self._FACTOR * max(self._durations)))


class Leases:
    """Numbers this start's leases; each carries the run's seed."""

    def __init__(
        self,
        groups: OpenGroups,
        servers: Servers,
        overdue: OverdueLimit,
        accounts: Accounts,
        seed: int,
        vocab_size: int | None,
        kept_turns: KeptTurns,
    ) -> None:
        """vocab_size: the policy's; None: any token is accepted."""
        self._num_leases = 0
        self._num_accepted = 0  # samples that came back in this start
        self._groups = groups
        self._servers = servers
        self._overdue = overdue
        self._ledger = accounts.ledger
        self._mailbox = accounts.mailbox
        self._counts = accounts.counts
        self._streaks = accounts.streaks
        self._seed = seed
        self._vocab_size = vocab_size
        self._kept_turns = kept_turns

    # -- out ----------------------------------------------------------------------------------------------------------

    def lease_all(self, versions: range, is_admitting: bool, now: float) -> bool:
        """Lease groups to servers that have room and hold weights of one of these versions.

        is_admitting: whether new prompts may be leased. Returns True when more may be leased in the next turn.
        """
        waiting: list[Group] = []
        until = self._num_leases + MOST_AT_ONCE
        while self._groups.may_have_next(is_admitting) and self._num_leases < until:
            server = self._servers.next_to_lease(versions)
            group = None if server is None else self._groups.next_group(is_admitting)
            if server is None or group is None:
                break
            if group.failed_on and (server := self._next_elsewhere(group, versions, now)) is None:
                waiting.append(group)
                continue
            self.lease(group, server, now)
        if waiting:
            self._groups.put_back(waiting)
        return self._num_leases == until

    def lease(self, group: Group, server: str, now: float) -> None:
        """Send a server with room the missing samples of this group."""
        self._num_leases += 1
        version = self._servers.reserve_slot(server, self._num_leases)
        resumed = self._kept_turns.resume(group, version)
        stamp = LeaseStamp(self._mailbox.run_id, self._mailbox.incarnation, self._seed, self._num_leases)
        lease = self._groups.lease(group, server, version, now, stamp, [turns.part for turns in resumed])
        self._counts["resumed"] += len(resumed)
        self._mailbox.send(server, lease, joined_buffers(resumed))

    def _next_elsewhere(self, group: Group, versions: range, now: float) -> str | None:
        """Return the server for a group that failed on some server; None while it waits for another one.

        A server on which every sample fails at once always has room. Without the wait it would get the same prompts
        until they are skipped. The wait is limited, because a busy server may hang.
        """
        server = self._servers.next_to_lease(versions, other_than=group.failed_on)
        is_waiting = self._servers.able(versions) - group.failed_on and now - group.leased_at < _ELSEWHERE_S
        if server is not None or is_waiting:
            return server
        return self._servers.next_to_lease(versions)

    # -- back ---------------------------------------------------------------------------------------------------------

    def receive(self, server: str, facts: TrajectoryFacts, buffers: list[bytes], versions: range, now: float) -> None:
        """Keep a valid trajectory; its server gets the outcome."""
        group = self._groups.find(facts.group)
        unusable = self._unusable_because(group, facts)
        if group is None or unusable is not None:
            self._ignore(server, facts, "unknown", unusable or "unknown")
            return
        try:
            trajectory = Trajectory.from_buffers(facts, buffers, "$.facts")
            _check_lease(group, facts, server, versions)
            check_vocabulary(trajectory.tokens, self._vocab_size)
        except FrameError as error:
            self._reject(group, facts, server, error)
            return
        if not self._groups.accept(group, trajectory):
            self._ignore(server, facts, "duplicate", "duplicate")
            return
        self._num_accepted += 1
        self._streaks.note_logs(facts.reward_logs)
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "accepted")
        if group.state is GroupState.READY and group.attempt == 1:
            self._overdue.observe(now - group.leased_at)

    def _unusable_because(self, group: Group | None, facts: TrajectoryFacts) -> str | None:
        """Return the ledger's word for a trajectory that cannot be used, or None.

        "unknown": no open group. "lineage": tokens of steps that this start's checkpoint does not have. "endpoints":
        rewards of other endpoints than this start's. "settings": a sample of other settings, such as the temperature.
        """
        if group is None:
            return "unknown"
        if facts.incarnation == self._mailbox.incarnation:
            return None
        newest = self._ledger.last_shared_version(facts.incarnation)
        if newest is None or facts.newest_version > newest:
            return "lineage"
        if facts.incarnation < self._ledger.sampled_since_start:
            return "settings"
        return "endpoints" if facts.incarnation < self._ledger.scored_since_start else None

    def _ignore(self, server: str, facts: TrajectoryFacts, outcome: m.Outcome, why: str) -> None:
        """Have a server drop a trajectory that is not needed."""
        self._counts[f"unused:{why}"] += 1
        self._groups.waste_trajectory(facts, why)
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, outcome)

    def _reject(self, group: Group, facts: TrajectoryFacts, server: str, error: FrameError) -> None:
        self._counts[f"rejected:{error.reason}"] += 1
        self._groups.waste_trajectory(facts, "rejected")
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "rejected", str(error))
        self._fail_one(group, facts.sample_index, facts.attempt, server, "trajectory", f"refused: {error}")

    def refuse(self, server: str, sample: SampleStamp, error: FrameError) -> None:
        """Have a server drop a result that is not a valid message."""
        self._mailbox.acknowledge(server, sample.group, sample.sample_index, "refused", str(error))
        group = self._groups.find(sample.group)
        self._fail_one(group, sample.sample_index, sample.attempt, server, "trajectory", f"refused: {error}")

    def receive_failure(self, server: str, message: m.SampleFailed) -> None:
        """Record that a neighbour of the server failed one sample of a lease."""
        self._mailbox.acknowledge(server, message.group, message.sample_index, "returned")
        group, index = self._groups.find(message.group), message.sample_index
        if group is not None and group.is_leased(index, server, message.attempt):
            self._counts[f"failed:{message.boundary}"] += 1
            place = "" if message.place is msgspec.UNSET else message.place
            self._streaks.add(message.boundary, message.detail, place, self._num_accepted)
        tokens, detail = message.num_model_tokens, message.detail
        self._fail_one(group, index, message.attempt, server, message.boundary, detail, tokens)

    def _fail_one(
        self,
        group: Group | None,
        index: int,
        attempt: int,
        server: str,
        boundary: str,
        detail: str,
        num_model_tokens: int = 0,
    ) -> None:
        """Fail a sample that the server still holds by this attempt."""
        if group is not None and group.is_leased(index, server, attempt):
            self._groups.fail(group, {index: attempt}, server, boundary, detail, num_model_tokens)


class LeaseRecall:
    """Recalls leases whose server is gone, that were lost on the way, or that are overdue."""

    def __init__(
        self, groups: OpenGroups, leases: Leases, servers: Servers, overdue: OverdueLimit, accounts: Accounts
    ) -> None:
        self._groups = groups
        self._leases = leases
        self._servers = servers
        self._overdue = overdue
        self._counts = accounts.counts
        # Samples of servers without a connection: server -> group -> sample -> attempt.
        self._out_of_reach: dict[str, dict[str, dict[int, int]]] = {}
        self._late: list[Group] = []  # overdue groups
        self._oldest_at = float("-inf")  # no other group that a server holds was leased before this time

    def take_back_unreachable(self, server: str, reason: str) -> None:
        """Release the samples of a server without a connection.

        They fail if the server has died. After a cut link they do not fail.
        """
        lost = self._out_of_reach.setdefault(server, {})
        for group in self._groups.held_by(server):
            lost[group.name] = {index: group.attempts[index] for index in group.take_back_from(server)}
            self._groups.release(group, reason)

    def note_alive(self, server: str) -> None:
        """Record that a server is alive and was not restarted: the samples it lost with its connection did not fail."""
        self._out_of_reach.pop(server, None)

    def take_back_from(self, server: str, reason: str) -> None:
        """Fail the samples of a server that died; its finished samples are kept.

        It counts against the samples: a prompt that crashes servers would otherwise crash every server, for ever.
        """
        for name, attempts in self._out_of_reach.pop(server, {}).items():
            if (group := self._groups.find(name)) is not None:
                open_ones = {index: attempt for index, attempt in attempts.items() if index not in group.trajectories}
                self._groups.fail(group, open_ones, server, DIED, reason)
        for group in self._groups.held_by(server):
            attempts = {index: group.attempts[index] for index in group.held_by(server)}
            self._groups.fail(group, attempts, server, DIED, reason)

    def take_back_lost(self, server: str, heard_of_lease: int, here: Mapping[str, int]) -> None:
        """Release the leases that were lost on the way: the server knows of a later lease and does not have them.

        here: group that the server has -> attempt of its newest lease there.
        """
        for group in self._groups.held_by(server):
            sent = group.leases.get(server, SentLease(heard_of_lease + 1, 0))
            if sent.number <= heard_of_lease and here.get(group.name, 0) < sent.attempt:
                self.undo_lease(group.name, server)

    def undo_lease(self, name: str, server: str) -> None:
        """Release the samples of a lease that did not reach its server."""
        group = self._groups.find(name)
        if group is not None and group.take_back_from(server):
            self._counts["lost_leases"] += 1
            self._groups.release(group, f"{server} never got its lease")

    def expire(self, versions: range, now: float) -> None:
        """Lease overdue groups a second time, where another server has room; fail samples that reached the limit."""
        if now - self._oldest_at > self._overdue.overdue_s:
            held = [group for group in self._groups.all_open() if group.holders]
            before = now - self._overdue.overdue_s
            self._late = [group for group in held if group.leased_at < before]
            self._oldest_at = min([now, *(group.leased_at for group in held if group.leased_at >= before)])
        late, self._late = self._late, []
        for group in late:
            age_s = now - group.leased_at
            if self._groups.find(group.name) is not group or not group.holders:
                continue
            if age_s <= self._overdue.overdue_s:
                self._oldest_at = min(self._oldest_at, group.leased_at)
                continue
            self._late.append(group)
            if age_s > self._overdue.limit_s:
                self._fail_late(group)
            elif not group.is_leased_twice:
                self._lease_twice(group, versions, now)

    def _fail_late(self, group: Group) -> None:
        """Fail every sample of a group that a server still makes."""
        for server in sorted(set(group.holders.values())):
            # The samples of one server may be why the prompt is skipped: then the group is closed.
            if self._groups.find(group.name) is group:
                detail = f"{server} did not bring it back within {self._overdue.limit_s:g} s"
                attempts = {index: group.attempts[index] for index in group.held_by(server)}
                self._groups.fail(group, attempts, server, "lease", detail)

    def _lease_twice(self, group: Group, versions: range, now: float) -> None:
        """Lease the running samples to another server; the first result of each counts."""
        holders = set(group.holders.values())
        server = self._servers.next_to_lease(versions, other_than=holders)
        if server is None:
            return
        group.is_leased_twice = True
        for holder in holders:
            group.take_back_from(holder)
        self._counts["leased_twice"] += 1
        self._leases.lease(group, server, now)


def _check_lease(group: Group, facts: TrajectoryFacts, server: str, versions: range) -> None:
    """Raise FrameError when a trajectory differs from its server's lease, or has weights that do not exist."""
    if (problem := group.contradiction(facts, server)) is not None:
        raise FrameError("$.facts", problem, "lease")
    if (newest := facts.newest_version) > versions[-1]:
        problem = f"has version {newest}, the learner is at {versions[0]}"
        raise FrameError("$.facts.version_spans", problem, "version")
