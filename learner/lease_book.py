"""Every group between its first lease and its training: who holds which sample, what is back, what goes out again.

The coordinator's lease side. Training groups take slots of the staleness window; an evaluation's groups do not, but are
leased, returned and taken back in the same way. `learner.step_book` is the other side: it takes ready groups away.
"""

from collections import Counter, deque
from collections.abc import Sequence

from learner.evaluation import Evaluations
from learner.groups import Group
from learner.ledger import Ledger
from learner.mailbox import Mailbox
from learner.prompt_source import PromptSource
from learner.server_book import ServerBook
from learner.window import Outstanding, StalenessWindow
from protocol import messages as m
from protocol.settings import Settings
from protocol.trajectory import FrameError, Trajectory, TrajectoryFacts


class LeaseBook:
    """`groups`: the training groups that hold a slot of the window, in lease order."""

    def __init__(
        self,
        settings: Settings,
        source: PromptSource,
        evaluations: Evaluations,
        servers: ServerBook,
        window: StalenessWindow,
        ledger: Ledger,
        mailbox: Mailbox,
        counts: Counter[str],
    ) -> None:
        self.groups: dict[str, Group] = {}
        self._limit_s = settings.rollout.lease_timeout_s
        self._seed = settings.run.seed
        self._source = source
        self._evaluations = evaluations
        self._servers = servers
        self._window = window
        self._ledger = ledger
        self._mailbox = mailbox
        self._counts = counts
        self._to_lease: deque[Group] = deque()

    # -- out ----------------------------------------------------------------------------------------------------------

    def lease_all(self, versions: range, is_admitting: bool, now: float) -> None:
        """Lease what there is to servers that want groups and hold weights of one of these versions.

        is_admitting: whether prompts that were never out may go out, besides those that came back.
        """
        while (server := self._servers.next_to_lease(versions)) is not None:
            group = self._next_group(is_admitting)
            if group is None:
                return
            self._lease(group, server, now)

    def _lease(self, group: Group, server: str, now: float) -> None:
        version = self._servers.take_wish(server)
        run_id, incarnation = self._mailbox.run_id, self._mailbox.incarnation
        lease = group.lease_to(server, version, now, run_id, incarnation, self._seed)
        if group.kind == "train":
            self._ledger.lease(group.name, group.epoch, group.prompt.uid, group.position, server, group.attempt)
        self._mailbox.send(server, lease)

    def _next_group(self, is_admitting: bool) -> Group | None:
        return self._evaluations.next_group() or self._next_returned() or (self._next_new() if is_admitting else None)

    def _next_returned(self) -> Group | None:
        while self._to_lease:
            group = self._to_lease.popleft()
            if group.name in self.groups and group.missing:
                return group
        return None

    def _next_new(self) -> Group | None:
        if not self._window.num_free(len(self.groups)):
            return None
        group = self._source.take()
        if group is not None:
            self.groups[group.name] = group
        return group

    # -- back ---------------------------------------------------------------------------------------------------------

    def receive(self, server: str, facts: TrajectoryFacts, buffers: list[bytes], versions: range) -> None:
        """Keep a trajectory if it is what was leased and of weights that exist; its server hears what became of it."""
        group = self._find(facts.group)
        if group is None:
            self._counts["duplicate"] += 1
            self._mailbox.acknowledge(server, facts.group, facts.sample_index, "unknown")
            return
        try:
            trajectory = Trajectory.from_buffers(facts, buffers, "$.facts")
            _check_lease(group, facts, server, versions)
        except FrameError as error:
            self._reject(group, facts, server, error)
            return
        if not group.receive(trajectory):
            self._counts["duplicate"] += 1
            self._mailbox.acknowledge(server, facts.group, facts.sample_index, "duplicate")
            return
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "accepted")
        self._ledger.add_trajectory(facts, self._mailbox.incarnation)
        if group.is_ready:
            self._note_ready(group)

    def _reject(self, group: Group, facts: TrajectoryFacts, server: str, error: FrameError) -> None:
        self._counts[f"rejected:{error.reason}"] += 1
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "rejected", str(error))
        if group.holders.get(facts.sample_index) == server:
            self._fail(group, facts.sample_index, f"trajectory refused: {error}")

    def _note_ready(self, group: Group) -> None:
        if group.kind == "eval":
            self._evaluations.close(group)
        else:
            self._ledger.set_state([group.name], "ready")

    def receive_failure(self, server: str, message: m.SampleFailed) -> None:
        """Note that a neighbour of the server failed one sample of a lease: it goes out again, or is given up."""
        self._mailbox.acknowledge(server, message.group, message.sample_index, "returned")
        group = self._find(message.group)
        if group is not None and group.holders.get(message.sample_index) == server:
            self._counts[f"failed:{message.boundary}"] += 1
            self._fail(group, message.sample_index, f"{message.boundary}: {message.detail}")

    def _fail(self, group: Group, sample_index: int, reason: str) -> None:
        group.fail(sample_index, reason)
        self._ledger.add_event("failed", f"{group.name}[{sample_index}] {reason}")
        self._skip_or_release(group, reason)

    # -- taken back ---------------------------------------------------------------------------------------------------

    def take_back_from(self, server: str, reason: str) -> None:
        """Release what a server held; its finished samples are kept."""
        for group in self._open_groups():
            if group.take_back_from(server):
                self._release(group, reason)

    def expire(self, now: float) -> None:
        """Take back leases that outlived their time.

        Every sample that is still out counts as failed: a prompt that never comes back is not leased for ever.
        """
        for group in self._open_groups():
            if not group.holders or now - group.leased_at <= self._limit_s:
                continue
            reason = f"lease expired after {self._limit_s:g} s"
            for index, server in list(group.holders.items()):
                group.fail(index, f"{reason} on {server}")
            self._ledger.add_event("expired", f"{group.name} {reason}")
            self._skip_or_release(group, reason)

    def drop_stale(self, policy_version: int) -> None:
        """Make groups anew that no step on weights of this version, or a later one, could use."""
        for name in self._window.too_old(self.outstanding(policy_version), policy_version):
            group = self.groups[name]
            self._counts["dropped:stale"] += 1
            group.restart()
            self._ledger.forget_trajectories(name)
            self._release(group, f"too old at policy version {policy_version}")

    def _skip_or_release(self, group: Group, reason: str) -> None:
        if (why := group.dead_letter) is not None:
            self._skip(group, why)
        else:
            self._release(group, reason)

    def _release(self, group: Group, reason: str) -> None:
        """Queue the group's missing samples for another lease; its finished ones are kept."""
        self._counts["retried"] += 1
        if group.kind == "eval":
            self._evaluations.release(group)
            return
        if group not in self._to_lease:
            self._to_lease.append(group)
        self._ledger.set_state([group.name], "pending", reason=reason[:500])

    def _skip(self, group: Group, reason: str) -> None:
        """Give a prompt up, with its reason in the ledger. Its slot is free for another prompt."""
        self._counts["skipped"] += 1
        if group.kind == "eval":
            self._evaluations.close(group)
            return
        self._source.replace_skipped()
        self._ledger.set_state([group.name], "skipped", reason=reason[:2000])
        self.close([group])

    # -- for the step side --------------------------------------------------------------------------------------------

    def outstanding(self, policy_version: int) -> list[Outstanding]:
        """Return the training groups as the window sees them. One that waits for a lease will be of these weights."""
        return [
            Outstanding(g.name, g.oldest_version if g.is_begun else policy_version, g.is_ready)
            for g in self.groups.values()
        ]

    def close(self, groups: Sequence[Group]) -> None:
        """Free the slots of groups that are accounted for; their servers need not keep them any longer."""
        for group in groups:
            self.groups.pop(group.name)
        self._mailbox.release(groups)

    def _find(self, name: str) -> Group | None:
        return self.groups.get(name) or self._evaluations.find(name)

    def _open_groups(self) -> list[Group]:
        return [*self.groups.values(), *self._evaluations.open_groups()]


def _check_lease(group: Group, facts: TrajectoryFacts, server: str, versions: range) -> None:
    """Raise FrameError when a trajectory is not what its server was asked for, or of weights that do not exist."""
    if (problem := group.contradiction(facts, server)) is not None:
        raise FrameError("$.facts", problem, "lease")
    if facts.newest_version > versions[-1]:
        problem = f"has version {facts.newest_version}, the learner is at {versions[0]}"
        raise FrameError("$.facts.version_spans", problem, "version")
