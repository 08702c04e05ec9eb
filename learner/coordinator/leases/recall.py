"""Leases that do not come back by themselves: whose server is gone, that were lost on the way, that are overdue.

What is taken back fails or is released, and goes out again as any other group.
"""

from collections.abc import Mapping

from learner.coordinator.accounts import Tally
from learner.coordinator.groups.group import DIED, Group, SentLease
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.leases.leases import Leases
from learner.coordinator.leases.overdue import OverdueLimit
from learner.coordinator.leases.servers import Servers


class LeaseRecall:
    """What is out, and on which server, is in the groups; here is what servers had whose connection was lost."""

    def __init__(
        self, groups: OpenGroups, leases: Leases, servers: Servers, overdue: OverdueLimit, tally: Tally
    ) -> None:
        self._groups = groups
        self._leases = leases
        self._servers = servers
        self._overdue = overdue
        self._tally = tally
        # server -> group -> sample -> attempt: it may have died with them, or its link is cut
        self._out_of_reach: dict[str, dict[str, dict[int, int]]] = {}

    def take_back_unreachable(self, server: str, reason: str) -> None:
        """Release what a server holds that has no connection. It counts against the samples once it is known to have
        died; a server that speaks again (`spare`) had its link cut, for which no sample is to blame.
        """
        lost = self._out_of_reach.setdefault(server, {})
        for group in self._groups.held_by(server):
            lost[group.name] = {index: group.attempts[index] for index in group.take_back_from(server)}
            self._groups.release(group, reason)

    def spare(self, server: str) -> None:
        """Count nothing against what a server had when its connection was lost: it is there, and did not begin anew."""
        self._out_of_reach.pop(server, None)

    def release_from(self, server: str, reason: str) -> None:
        """Release what a server held that was taken from the run: it counts against no sample."""
        for group in self._groups.held_by(server):
            group.take_back_from(server)
            self._groups.release(group, f"{server}: {reason}")
        self.spare(server)

    def take_back_from(self, server: str, reason: str) -> None:
        """Release what a server held that died; its finished samples are kept.

        It counts against the samples that it held: were they what ends it, they would end every server, for ever. But
        of several suspects one may be guilty alone: each goes out again, apart from the others, before more counts.
        """
        held = self._groups.held_by(server)
        lost = [
            (group, attempts)
            for name, attempts in self._out_of_reach.pop(server, {}).items()
            if (group := self._groups.find(name)) is not None
        ]
        are_several = sum(group.is_suspect for group in {*held, *(group for group, _ in lost)}) > 1
        for group, attempts in lost:
            if not (group.is_suspect and are_several):
                self._groups.count_death(group, attempts, server, reason)
        for group in held:
            if group.is_suspect and are_several:
                group.take_back_from(server)
                self._groups.release(group, f"{DIED}: {reason}")
            else:
                self._groups.fail(group, group.held_by(server), server, DIED, reason)

    def take_back_lost(self, server: str, heard_of_lease: int, here: Mapping[str, int]) -> None:
        """Release what a server does not have, though it has heard of a later lease: the lease was lost on the way.

        here: the groups that it says it has, each with its newest lease's attempt.
        """
        for group in self._groups.held_by(server):
            sent = group.leases.get(server, SentLease(heard_of_lease + 1, 0))
            if sent.number <= heard_of_lease and here.get(group.name, 0) < sent.attempt:
                self.undo_lease(group.name, server)

    def undo_lease(self, name: str, server: str) -> None:
        """Release what a server was leased of a group and never got."""
        group = self._groups.find(name)
        if group is not None and group.take_back_from(server):
            self._tally.lost_leases += 1
            self._groups.release(group, f"{server} never got its lease")

    def expire(self, versions: range, now: float) -> None:
        """Lease a second time what is overdue, where another server has room; take back what outlived its time.

        Every sample that is still out at the limit counts as failed: a prompt that never comes back is not leased for
        ever.
        """
        for group in self._groups.all_open():
            age_s = now - group.leased_at
            if not group.holders or age_s <= self._overdue.overdue_s:
                continue
            if age_s > self._overdue.limit_s:
                self._fail_late(group)
            elif not group.is_leased_twice:
                self._lease_twice(group, versions, now)

    def _fail_late(self, group: Group) -> None:
        """Count every sample that is out as failed, on its server."""
        for server in sorted(set(group.holders.values())):
            # What one server was late with may be what the prompt is given up for: then it is accounted for.
            if self._groups.find(group.name) is group:
                detail = f"{server} did not bring it back within {self._overdue.limit_s:g} s"
                self._groups.fail(group, group.held_by(server), server, "lease", detail)

    def _lease_twice(self, group: Group, versions: range, now: float) -> None:
        """Have another server make the samples that are out; whoever is first with one counts."""
        holders = set(group.holders.values())
        taken = self._groups.servers_of_suspects() if group.is_suspect else set()
        server = self._servers.next_to_lease(versions, other_than=holders | taken)
        if server is None:
            return
        group.is_leased_twice = True
        for holder in holders:
            group.take_back_from(holder)
        self._tally.leased_twice += 1
        self._leases.lease(group, server, now)
