"""Every group between its first lease and its training: who holds which sample, what is back, what goes out again.

The coordinator's lease side. Training groups take slots of the staleness window; an evaluation's groups do not, but are
leased, returned and taken back in the same way. `learner.step_book` is the other side: it takes ready groups away.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal

from learner.evaluation import Evaluations
from learner.groups import DIED, Group
from learner.lease_clock import LeaseClock
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
        vocab_size: int | None = None,
    ) -> None:
        """vocab_size: of the policy; None: any token is taken."""
        self._vocab_size = vocab_size
        self._limit_s = settings.rollout.lease_timeout_s
        self._clock = LeaseClock(self._limit_s)
        self._num_leases = 0
        self._seed = settings.run.seed
        self._source = source
        self._evaluations = evaluations
        self._servers = servers
        self._window = window
        self._ledger = ledger
        self._mailbox = mailbox
        self._counts = counts
        # What an earlier start left unfinished has its slots at once: its samples may be on servers still.
        self.groups: dict[str, Group] = {group.name: group for group in source.recall(window.size)}
        self._to_lease: deque[Group] = deque(self.groups.values())

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
        self._num_leases += 1
        lease = group.lease_to(server, version, now, self._num_leases, run_id, incarnation, self._seed)
        self._servers.note_lease(server, self._num_leases)
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

    def receive(self, server: str, facts: TrajectoryFacts, buffers: list[bytes], versions: range, now: float) -> None:
        """Keep a trajectory if it is what was leased and of weights that exist; its server hears what became of it."""
        group = self._find(facts.group)
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
            self._note_ready(group, now)

    def _is_of_lost_weights(self, facts: TrajectoryFacts) -> bool:
        """Return whether a trajectory of an earlier start holds tokens of steps that its checkpoint did not have."""
        if facts.incarnation == self._mailbox.incarnation:
            return False
        newest = self._ledger.newest_valid_version(facts.incarnation)
        return newest is None or facts.newest_version > newest

    def _pass_over(self, server: str, facts: TrajectoryFacts, why: str) -> None:
        """Have a server forget a trajectory that is of no use: its sample is back already, or its weights are lost."""
        self._counts[f"unused:{why}"] += 1
        self._ledger.waste(facts.group, facts.sample_index, facts.attempt, why, _num_model_tokens(facts))
        outcome: Literal["duplicate", "unknown"] = "duplicate" if why == "duplicate" else "unknown"
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, outcome)

    def _reject(self, group: Group, facts: TrajectoryFacts, server: str, error: FrameError) -> None:
        self._counts[f"rejected:{error.reason}"] += 1
        self._ledger.waste(facts.group, facts.sample_index, facts.attempt, "rejected", _num_model_tokens(facts))
        self._mailbox.acknowledge(server, facts.group, facts.sample_index, "rejected", str(error))
        if group.holders.get(facts.sample_index) == server:
            self._fail(group, [facts.sample_index], server, "trajectory", f"refused: {error}")

    def _note_ready(self, group: Group, now: float) -> None:
        if group.attempt == 1:
            self._clock.note(now - group.leased_at)
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
            if message.num_model_tokens:
                self._ledger.waste(
                    group.name, message.sample_index, message.attempt, "failed", message.num_model_tokens
                )
            self._fail(group, [message.sample_index], server, message.boundary, message.detail)

    def _fail(self, group: Group, sample_indices: Sequence[int], server: str, boundary: str, detail: str) -> None:
        """Note that samples failed on a server; they go out again, or their prompt is given up."""
        for index in sample_indices:
            group.fail(index, boundary, detail)
            self._ledger.fail(group.name, index, group.attempt, server, boundary, detail)
        if (why := group.dead_letter) is not None:
            self._skip(group, why)
        else:
            self._release(group, f"{boundary}: {detail}")

    # -- taken back ---------------------------------------------------------------------------------------------------

    def take_back_from(self, server: str, reason: str) -> None:
        """Release what a server held that is gone; its finished samples are kept.

        It counts against the samples that it held: were they what ends it, they would end every server, for ever.
        """
        for group in self._open_groups():
            if indices := group.held_by(server):
                self._fail(group, indices, server, DIED, reason)

    def take_back_lost(self, server: str, heard_of_lease: int, here: Mapping[str, int]) -> None:
        """Release what a server does not have, though it has heard of a later lease: the lease was lost on the way.

        here: the groups that it says it has, each with its newest lease's attempt.
        """
        for group in self._open_groups():
            number, attempt = group.leases.get(server, (heard_of_lease + 1, 0))
            if number <= heard_of_lease and here.get(group.name, 0) < attempt:
                self.undo_lease(group.name, server)

    def undo_lease(self, name: str, server: str) -> None:
        """Release what a server was leased of a group and never got."""
        group = self._find(name)
        if group is not None and group.take_back_from(server):
            self._counts["lost_leases"] += 1
            self._release(group, f"{server} never got its lease")

    def expire(self, versions: range, now: float) -> None:
        """Lease a second time what is overdue, where another server has room; take back what outlived its time.

        Every sample that is still out at the limit counts as failed: a prompt that never comes back is not leased for
        ever.
        """
        for group in self._open_groups():
            age_s = now - group.leased_at
            if not group.holders or age_s <= min(self._limit_s, self._clock.overdue_s):
                continue
            if age_s > self._limit_s:
                for server in sorted(set(group.holders.values())):
                    detail = f"{server} did not bring it back within {self._limit_s:g} s"
                    self._fail(group, group.held_by(server), server, "lease", detail)
            elif not group.is_leased_twice:
                self._lease_twice(group, versions, now)

    def _lease_twice(self, group: Group, versions: range, now: float) -> None:
        """Have another server make the samples that are out; whoever is first with one counts."""
        holders = set(group.holders.values())
        server = self._servers.next_to_lease(versions, other_than=holders)
        if server is None:
            return
        group.is_leased_twice = True
        for holder in holders:
            group.take_back_from(holder)
        self._counts["leased_twice"] += 1
        self._lease(group, server, now)

    def drop_stale(self, policy_version: int) -> None:
        """Make groups anew that no step on weights of this version, or a later one, could use."""
        for name in self._window.too_old(self.outstanding(policy_version), policy_version):
            group = self.groups[name]
            self._counts["dropped:stale"] += 1
            self._waste_all(group, "stale")
            group.restart(self._mailbox.incarnation)
            self._ledger.forget_trajectories(name)
            self._release(group, f"too old at policy version {policy_version}")

    def _release(self, group: Group, reason: str) -> None:
        """Queue the group's missing samples for another lease; its finished ones are kept."""
        self._counts["retried"] += 1
        group.is_leased_twice = False
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
        self._waste_all(group, "failed")
        self._ledger.set_state([group.name], "skipped", reason=reason[:2000])
        self.close([group])

    def _waste_all(self, group: Group, reason: str) -> None:
        """Count a group's finished samples as tokens that will not be trained."""
        for trajectory in group.trajectories.values():
            facts = trajectory.facts
            self._ledger.waste(group.name, facts.sample_index, facts.attempt, reason, _num_model_tokens(facts))

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


def _num_model_tokens(facts: TrajectoryFacts) -> int:
    return sum(span.end - span.start for span in facts.version_spans)


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
