"""Every group between its first lease and its training: which goes out next, and what becomes of it.

Training groups take slots of the staleness window; an evaluation's groups do not, but go out, fail and go out again in
the same way. What becomes of a group is written to the ledger here and nowhere else.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.evaluations import Evaluations
from learner.coordinator.groups.group import DIED, Group
from learner.coordinator.groups.kept_turns import KeptTurns
from learner.coordinator.groups.prompt_source import PromptSource
from learner.coordinator.groups.score_filter import ScoreFilter
from learner.coordinator.window import Outstanding, StalenessWindow
from learner.ledger.ledger import NOT_APPLIED
from protocol.wire.conversation import ConversationPart
from protocol.wire.messages import Lease
from protocol.wire.trajectory import Trajectory, TrajectoryFacts


class OpenGroups:
    """`training`: the training groups that hold a slot of the window, in lease order.

    filtered_of_step: how many groups were filtered, or prompts not drawn, before the step that took its groups last;
    empty without a filter and a curriculum.
    hopeless: why the run is to end, once as many prompts in a row were given up as data.train has.
    """

    def __init__(
        self,
        source: PromptSource,
        evaluations: Evaluations,
        window: StalenessWindow,
        score_filter: ScoreFilter,
        accounts: Accounts,
    ) -> None:
        self.filtered_of_step: dict[str, float] = {}
        self.hopeless: str | None = None
        self._num_given_up = 0  # prompts in a row, without one that came back whole
        self._source = source
        self._evaluations = evaluations
        self._window = window
        self._filter = score_filter
        self._ledger = accounts.ledger
        self._mailbox = accounts.mailbox
        self._tally = accounts.tally
        # What an earlier start left unfinished has its slots at once: its samples may be on servers still.
        self.training: dict[str, Group] = {group.name: group for group in source.recall(window.size)}
        self._to_lease: deque[Group] = deque(self.training.values())
        # server -> the groups that it was leased, by name. Those that it has no part of any more are dropped when met.
        self._by_server: dict[str, dict[str, Group]] = {}

    def find(self, name: str) -> Group | None:
        """Return the open group of this name, of training or of an evaluation."""
        return self.training.get(name) or self._evaluations.find(name)

    def all_open(self) -> list[Group]:
        """Return training's and evaluations' groups; they may fail and be closed while they are gone through."""
        return [*self.training.values(), *self._evaluations.open_groups()]

    def held_by(self, server: str) -> list[Group]:
        """Return the open groups of which a server makes samples; they may fail and be closed meanwhile."""
        sent = self._by_server.get(server, {})
        held = {name: group for name, group in sent.items() if self.find(name) is group and group.held_by(server)}
        self._by_server[server] = held
        return list(held.values())

    def servers_of_suspects(self) -> set[str]:
        """Return the servers that make samples of a group that may be what ends servers."""
        return {server for group in self.all_open() if group.is_suspect for server in group.holders.values()}

    @property
    def num_ready(self) -> int:
        """Training groups that a step could take, if the window lets it."""
        return sum(group.is_ready for group in self.training.values())

    def outstanding(self, policy_version: int) -> list[Outstanding]:
        """Return the training groups as the window sees them. One that waits for a lease will be of these weights."""
        return [
            Outstanding(g.name, g.oldest_version if g.is_begun else policy_version, g.is_ready)
            for g in self.training.values()
        ]

    # -- out ----------------------------------------------------------------------------------------------------------

    def next_group(self, is_admitting: bool) -> Group | None:
        """Take the next group with missing samples: an evaluation's, one that came back, one that was never out.

        is_admitting: whether prompts that were never out may go out.
        """
        return self._evaluations.next_group() or self._next_returned() or (self._next_new() if is_admitting else None)

    def _next_returned(self) -> Group | None:
        while self._to_lease:
            group = self._to_lease.popleft()
            if group.name in self.training and group.missing:
                return group
        return None

    def _next_new(self) -> Group | None:
        if not self._window.num_free(len(self.training)):
            return None
        group = self._source.take()
        if group is not None:
            self.training[group.name] = group
        return group

    def put_back(self, groups: Sequence[Group]) -> None:
        """Queue groups again that were taken and could not be leased now, before all others."""
        for group in reversed(groups):
            if group.kind == "eval":
                self._evaluations.put_back(group)
            else:
                self._to_lease.appendleft(group)

    def lease(self, group: Group, server: str, version: int, now: float, number: int, seed: int) -> Lease:
        """Return the lease of a group's missing samples to a server that holds weights of this version."""
        if group.kind == "train":
            for index, turns in list(group.kept.items()):
                if self._window.is_too_old(turns.oldest_version, version):
                    self._waste_kept(group, index, group.kept.pop(index), "stale")
        run_id, incarnation = self._mailbox.run_id, self._mailbox.incarnation
        lease = group.lease_to(server, version, now, number, run_id, incarnation, seed)
        self._by_server.setdefault(server, {})[group.name] = group
        if group.kind == "train":
            self._ledger.lease(group.name, group.epoch, group.prompt.uid, group.position, server, group.attempt)
        return lease

    # -- back ---------------------------------------------------------------------------------------------------------

    def keep_turns(self, group: Group, part: ConversationPart, buffers: Sequence[bytes]) -> None:
        """Keep turns of a sample that is out. Deaths before them no longer count against it: it gets on."""
        if (kept := group.kept.get(part.sample_index)) is None:
            group.kept[part.sample_index] = KeptTurns(part, buffers)
        else:
            kept.add(part, buffers)
        if group.forget_deaths(part.sample_index):
            self._ledger.forget_deaths(group.name, part.sample_index)

    def accept(self, group: Group, trajectory: Trajectory) -> bool:
        """Keep a trajectory; False when its sample is back already, or was given up."""
        if not group.receive(trajectory):
            return False
        self._ledger.add_trajectory(trajectory.facts, trajectory.facts.incarnation)
        if group.is_ready:
            if group.kind == "eval":
                self._evaluations.close(group)
            else:
                self._num_given_up = 0
                self._judge(group)
        return True

    def _judge(self, group: Group) -> None:
        """Have a group that is back whole wait for a step, or replace it by another prompt."""
        verdict = self._filter.judge(group)
        if verdict.is_kept:
            group.kept_because = verdict.reason
            self._ledger.set_state([group.name], "ready", reason=verdict.reason)
            return
        self._tally.filtered += 1
        self._source.replace_skipped()
        self._waste_all(group, "filtered")
        self._ledger.set_state([group.name], "skipped", reason=verdict.reason)
        self._close([group])

    def waste(self, facts: TrajectoryFacts, reason: str) -> None:
        """Count what a server made as tokens that will not be trained."""
        self._ledger.waste(facts.group, facts.sample_index, facts.attempt, reason, facts.num_model_tokens)

    def waste_unfinished(self, group: Group, index: int, attempt: int, num_tokens: int) -> None:
        """Count what was written of a sample that failed as tokens that will not be trained, kept turns among them."""
        if (kept := group.kept.pop(index, None)) is not None:
            num_tokens = max(num_tokens, kept.num_model_tokens)
        if num_tokens:
            self._ledger.waste(group.name, index, attempt, "failed", num_tokens)

    def fail(self, group: Group, sample_indices: Sequence[int], server: str, boundary: str, detail: str) -> None:
        """Note that samples failed on a server; they go out again, or their prompt is given up."""
        for index in sample_indices:
            self._waste_kept(group, index, group.fail(index, boundary, detail), "failed")
            self._ledger.fail(group.name, index, group.attempts[index], server, boundary, detail)
        if (why := group.dead_letter) is not None:
            self._skip(group, why)
        else:
            self.release(group, f"{boundary}: {detail}")

    def count_death(self, group: Group, attempts: Mapping[int, int], server: str, detail: str) -> None:
        """Note that a server died while it made these samples, which went out elsewhere before that was known.

        attempts: sample -> the attempt of its lease to that server. Samples that are back by now do not count.
        """
        for index, attempt in attempts.items():
            if index not in group.trajectories:
                self._waste_kept(group, index, group.note_failure(index, DIED, detail), "failed")
                self._ledger.fail(group.name, index, attempt, server, DIED, detail)
        if (why := group.dead_letter) is not None:
            self._skip(group, why)

    def release(self, group: Group, reason: str) -> None:
        """Queue the group's missing samples for another lease; its finished ones are kept."""
        self._tally.retried += 1
        group.is_leased_twice = False
        if group.kind == "eval":
            self._evaluations.release(group)
            return
        if group not in self._to_lease:
            self._to_lease.append(group)
        self._ledger.set_state([group.name], "pending", reason=reason[:500])

    def drop_stale(self, policy_version: int) -> None:
        """Make groups anew that no step on weights of this version, or a later one, could use."""
        begun = [group for group in self.training.values() if group.is_begun]
        for group in [g for g in begun if self._window.is_too_old(g.oldest_version, policy_version)]:
            self._tally.stale += 1
            self._waste_all(group, "stale")
            group.restart(self._mailbox.incarnation)
            self._ledger.forget_trajectories(group.name)
            self.release(group, f"too old at policy version {policy_version}")

    # -- trained ------------------------------------------------------------------------------------------------------

    def assign(self, names: Sequence[str], step: int) -> list[Group]:
        """Note that a step trains on these groups; returns them."""
        self.filtered_of_step = self._filter.take_counts() | self._source.take_counts()
        self._ledger.set_state(names, "assigned", step)
        return [self.training[name] for name in names]

    def train(self, groups: Sequence[Group], step: int, policy_version: int) -> None:
        """Note that groups are inside a step that was taken on weights of this version."""
        self._ledger.mark_trained([group.name for group in groups], step, policy_version)
        for group in groups:
            if group.kept_because is not None:
                self._ledger.set_state([group.name], "trained", step, group.kept_because)
        self._close(groups)

    def skip_step(self, groups: Sequence[Group], step: int, detail: str) -> None:
        """Note that the step of these groups was not applied: their prompts are given up with it."""
        self._tally.skipped += len(groups)
        self._ledger.set_state([group.name for group in groups], "skipped", step, f"{NOT_APPLIED}{detail}")
        self._ledger.add_event("not_applied", f"step {step}: {detail}")
        self._close(groups)

    def _skip(self, group: Group, reason: str) -> None:
        """Give a prompt up, with its reason in the ledger. Its slot is free for another prompt."""
        self._tally.skipped += 1
        if group.kind == "eval":
            self._evaluations.close(group)
            return
        self._source.replace_skipped()
        self._waste_all(group, "failed")
        self._ledger.set_state([group.name], "skipped", reason=reason[:2000])
        self._close([group])
        self._num_given_up += 1
        if self._num_given_up >= max(self._source.num_prompts, self._window.size):
            # Every epoch would be the same: what ends servers, or fails everywhere, would do so for ever.
            self.hopeless = (
                f"the last {self._num_given_up} prompts were given up, one after the other, as many as data.train has "
                f"or more. {group.name}: {reason[:1000]}. Mend what failed, or the prompts, and start the run again."
            )

    def _close(self, groups: Sequence[Group]) -> None:
        """Free the slots of groups that are accounted for; their servers need not keep them any longer."""
        kept: dict[str, list[str]] = {}
        for group in groups:
            self.training.pop(group.name)
            for server in {t.facts.server for t in group.trajectories.values()}:
                kept.setdefault(server, []).append(group.name)
        self._mailbox.release(kept)

    def _waste_kept(self, group: Group, index: int, turns: KeptTurns | None, reason: str) -> None:
        """Count turns that were kept and are not gone on from as tokens that will not be trained."""
        if turns is not None:
            self._ledger.waste(group.name, index, turns.part.attempt, reason, turns.num_model_tokens)

    def _waste_all(self, group: Group, reason: str) -> None:
        """Count a group's finished samples, and turns of others, as tokens that will not be trained."""
        for index, turns in group.kept.items():
            self._waste_kept(group, index, turns, reason)
        for trajectory in group.trajectories.values():
            self.waste(trajectory.facts, reason)
