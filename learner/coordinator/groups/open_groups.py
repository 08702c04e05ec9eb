"""Every open group: which one is leased next, and how its state changes. Only this file writes states to the ledger.

Training groups hold slots of the staleness window. An evaluation's groups hold none and are leased first; they fail and
are leased again in the same way. Optional features listen; each is one file:

    on_ready     score_filter.py: may replace a whole group by another prompt
    on_failed    kept_turns.py: drops the sample's finished turns
    on_closed    kept_turns.py, evaluations.py, written_answers.py: the group's samples leave
    on_assigned  score_filter.py, curriculum.py: their counts for the line of metrics of a step that has its groups
    on_unused    the token books: note why a trajectory was not trained
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import Group, GroupState, LeaseStamp
from learner.coordinator.groups.prompt_source import PromptSource
from learner.data.window import Outstanding, StalenessWindow
from learner.ledger.ledger import NOT_APPLIED
from protocol.wire.conversation import ConversationPart
from protocol.wire.messages import Lease
from protocol.wire.trajectory import Trajectory, TrajectoryFacts

# Prompts skipped one after the other, after which the run ends; fewer if data.train has fewer.
_MAX_SKIPPED_IN_A_ROW = 256


class OpenGroups:
    """`training`, `evaluating`: open groups by name, in lease order.

    step_counts: of the last step, passes over data.train and numbers of the `on_assigned` listeners.
    give_up_reason: why the run has to end.
    """

    def __init__(self, source: PromptSource, window: StalenessWindow, accounts: Accounts) -> None:
        # (group) -> reason to skip a whole group instead of training it; None: it is trained
        self.on_ready: list[Callable[[Group], str | None]] = []
        # (group, sample, boundary) -> model tokens of the sample's finished turns that are dropped
        self.on_failed: list[Callable[[Group, int, str], int]] = []
        # (group, reason why its samples are not trained; None: they are trained or scored)
        self.on_closed: list[Callable[[Group, str | None], None]] = []
        self.on_assigned: list[Callable[[], Mapping[str, float]]] = []
        # (facts of a trajectory that is not trained, reason)
        self.on_unused: list[Callable[[TrajectoryFacts, str], None]] = []
        self.step_counts: dict[str, float] = {}
        self.give_up_reason: str | None = None
        self.num_ready = 0  # training groups that wait for a step
        self.changed: list[str] = []  # groups whose state changed since the last choice of a step's groups
        self._num_skipped_in_a_row = 0
        # The oldest version that may be trained, when all groups were last found to have it; no group is older since.
        self._checked_limit: int | None = None
        self._source = source
        self._window = window
        self._ledger = accounts.ledger
        self._mailbox = accounts.mailbox
        self._counts = accounts.counts
        # Unfinished groups of an earlier start get their slots at once: servers may still hold their samples.
        self.training: dict[str, Group] = {group.name: group for group in source.recall(window.size)}
        self.evaluating: dict[str, Group] = {}
        self._to_lease: dict[str, deque[Group]] = {"eval": deque(), "train": deque(self.training.values())}
        self._by_server: dict[str, dict[str, Group]] = {}  # server -> groups that it was leased

    def find(self, name: str) -> Group | None:
        return self.training.get(name) or self.evaluating.get(name)

    def all_open(self) -> list[Group]:
        """Return a copy: groups may fail and be closed while a caller walks it."""
        return [*self.training.values(), *self.evaluating.values()]

    def held_by(self, server: str) -> list[Group]:
        """Return the open groups of which a server makes samples."""
        sent = self._by_server.get(server, {})
        held = {name: group for name, group in sent.items() if self.find(name) is group and group.held_by(server)}
        self._by_server[server] = held
        return list(held.values())

    def outstanding(self, policy_version: int) -> list[Outstanding]:
        """Return the training groups without a step. One that waits for its first lease counts as this version."""
        return [
            Outstanding(
                g.name,
                g.oldest_version if g.holders or g.trajectories else policy_version,
                g.state is GroupState.READY,
            )
            for g in self.training.values()
            if g.state is not GroupState.ASSIGNED
        ]

    # -- leases -------------------------------------------------------------------------------------------------------

    def open_evaluation(self, groups: Sequence[Group]) -> None:
        """Open an evaluation's groups in place of the evaluation before it."""
        self.evaluating, self._to_lease["eval"] = {}, deque()
        self.open_more(groups)

    def open_more(self, groups: Sequence[Group]) -> None:
        """Open further groups of an evaluation."""
        self.evaluating |= {group.name: group for group in groups}
        self._to_lease["eval"].extend(groups)

    def next_group(self, is_admitting: bool) -> Group | None:
        """Take the next group with missing samples: an evaluation's, a returned one, or that of a new prompt.

        is_admitting: True if new prompts may be leased.
        """
        for queue in self._to_lease.values():
            while queue:
                group = queue.popleft()
                if self.find(group.name) is group and group.missing:
                    return group
        if not is_admitting or len(self.training) >= self._window.size:
            return None
        new = self._source.take()
        if new is not None:
            self.training[new.name] = new
        return new

    def may_have_next(self, is_admitting: bool) -> bool:
        return any(self._to_lease.values()) or (is_admitting and len(self.training) < self._window.size)

    def put_back(self, groups: Sequence[Group]) -> None:
        """Queue groups that could not be leased now before all others of their kind."""
        for group in reversed(groups):
            self._to_lease[group.kind].appendleft(group)

    def lease(
        self,
        group: Group,
        server: str,
        version: int,
        now: float,
        stamp: LeaseStamp,
        resumed: Sequence[ConversationPart],
    ) -> Lease:
        """Return the lease of a group's missing samples to a server that holds weights of this version."""
        lease = group.lease_to(server, version, now, stamp, resumed)
        self._note_age(group)
        self._by_server.setdefault(server, {})[group.name] = group
        if group.kind == "train":
            self._ledger.lease(group.name, group.epoch, group.prompt.uid, group.position, server, group.attempt)
        return lease

    # -- results ------------------------------------------------------------------------------------------------------

    def accept(self, group: Group, trajectory: Trajectory) -> bool:
        """Keep a trajectory; False when its sample is back already or was restarted."""
        if not group.receive(trajectory):
            return False
        self._note_age(group)
        self._ledger.add_trajectory(trajectory.facts)
        if group.is_ready:
            self._on_whole(group)
        return True

    def _on_whole(self, group: Group) -> None:
        """Have a whole group wait for a step, or skip it by the first listener that gives a reason."""
        if group.kind == "eval":
            group.move_to(GroupState.READY)
            self._close([group], None)
            return
        self._num_skipped_in_a_row = 0
        for judge in self.on_ready:
            if (reason := judge(group)) is not None:
                self._skip(group, reason, "filtered")
                return
        self._set_state([group], GroupState.READY, reason=group.kept_because)

    def fail(
        self,
        group: Group,
        attempts: Mapping[int, int],
        server: str,
        boundary: str,
        detail: str,
        num_model_tokens: int = 0,
    ) -> None:
        """Record that samples failed on a server; they are leased again, or their prompt is skipped.

        attempts: sample -> attempt of its lease to the server. num_model_tokens: tokens that the server had generated.
        """
        is_missing = False
        for index, attempt in attempts.items():
            lost = max([num_model_tokens, *(listen(group, index, boundary) for listen in self.on_failed)])
            if lost:
                self.waste(group.name, index, attempt, "failed", lost)
            self._ledger.add_failure(group.name, index, attempt, server, boundary, detail)
            is_missing = group.fail(index, server, boundary, detail) or is_missing
        if (why := group.dead_letter) is not None:
            self._counts["skipped"] += 1
            self._skip(group, why, "failed")
            if group.kind == "train":
                self._note_dead_letter(group, why)
        elif is_missing:
            self.release(group, f"{boundary}: {detail}")

    def release(self, group: Group, reason: str) -> None:
        """Queue the group's missing samples for another lease; its finished ones are kept."""
        self._counts["retried"] += 1
        group.is_leased_twice = False
        queue = self._to_lease[group.kind]
        if group not in queue:
            queue.append(group)
        self._set_state([group], GroupState.PENDING, reason=reason[:500])

    def drop_stale(self, policy_version: int) -> None:
        """Restart the groups that no step on weights of this version, or a later one, may use."""
        limit = policy_version - self._window.max_staleness
        if limit == self._checked_limit:
            return
        self._checked_limit = limit
        for group in list(self.training.values()):
            if group.oldest_version >= limit or not group.is_begun:
                continue
            self._counts["dropped:stale"] += 1
            self._discard(group, "stale")
            group.restart(self._mailbox.incarnation)
            self._ledger.delete_trajectories(group.name)
            self.release(group, f"too old at policy version {policy_version}")

    def waste(self, name: str, index: int, attempt: int, reason: str, num_tokens: int) -> None:
        """Count model tokens that are not trained."""
        self._ledger.add_waste(name, index, attempt, reason, num_tokens)

    def waste_trajectory(self, facts: TrajectoryFacts, reason: str) -> None:
        """Count the model tokens of a trajectory that is not trained."""
        self.waste(facts.group, facts.sample_index, facts.attempt, reason, facts.num_model_tokens)
        for listen in self.on_unused:
            listen(facts, reason)

    # -- steps --------------------------------------------------------------------------------------------------------

    def assign(self, groups: Sequence[Group], step: int) -> None:
        self._set_state(groups, GroupState.ASSIGNED, step)

    def count_step(self, groups: Sequence[Group]) -> None:
        """Set `step_counts` for a step that has all its groups."""
        self.step_counts = {name: value for counts in self.on_assigned for name, value in counts().items()}
        self.step_counts["progress/epoch"] = (1 + max(g.position for g in groups)) / self._source.num_prompts

    def train(self, groups: Sequence[Group], step: int, policy_version: int) -> None:
        """Record that a step on weights of this version trained the groups."""
        self._ledger.mark_trained([group.name for group in groups], step, policy_version)
        for group in groups:
            group.move_to(GroupState.TRAINED)
            if group.kept_because is not None:
                self._ledger.set_state([group.name], "trained", step, group.kept_because)
        self._close(groups, None)

    def skip_step(self, groups: Sequence[Group], step: int, detail: str) -> None:
        """Record that the step of these groups was not applied: their prompts are skipped with it."""
        self._counts["skipped"] += len(groups)
        self._set_state(groups, GroupState.SKIPPED, step, f"{NOT_APPLIED}{detail}")
        self._ledger.add_event("not_applied", f"step {step}: {detail}")
        self._close(groups, None)

    def _skip(self, group: Group, reason: str, waste: str) -> None:
        """Skip a prompt; its slot is free for another one."""
        self._set_state([group], GroupState.SKIPPED, reason=reason[:2000])
        if group.kind == "train":
            self._source.replace_skipped()
        self._close([group], waste)

    def _note_dead_letter(self, group: Group, reason: str) -> None:
        self._num_skipped_in_a_row += 1
        if self._num_skipped_in_a_row >= max(min(self._source.num_prompts, _MAX_SKIPPED_IN_A_ROW), self._window.size):
            # A fault of all servers, or of all prompts, does not go away.
            self.give_up_reason = (
                f"the last {self._num_skipped_in_a_row} prompts were skipped, one after the other. {group.name}: "
                f"{reason[:1000]}. Repair the cause, or the prompts, and start the run again."
            )

    def _set_state(
        self, groups: Sequence[Group], state: GroupState, step: int | None = None, reason: str | None = None
    ) -> None:
        for group in groups:
            was_ready = group.state is GroupState.READY
            group.move_to(state)
            if group.kind == "train":
                self.num_ready += (state is GroupState.READY) - was_ready
        names = [group.name for group in groups if group.kind == "train"]
        self.changed += names
        self._ledger.set_state(names, state.value, step, reason)

    def _note_age(self, group: Group) -> None:
        if self._checked_limit is not None and group.oldest_version < self._checked_limit:
            self._checked_limit = None

    def _close(self, groups: Sequence[Group], waste: str | None) -> None:
        """Free the groups' slots; their servers need not keep the trajectories any longer."""
        kept: dict[str, list[str]] = {}
        for group in groups:
            self._discard(group, waste)
            if group.kind == "eval":
                del self.evaluating[group.name]
                continue
            del self.training[group.name]
            for server in {t.facts.server for t in group.trajectories.values()}:
                kept.setdefault(server, []).append(group.name)
        self._mailbox.release(kept)

    def _discard(self, group: Group, waste: str | None) -> None:
        for listen in self.on_closed:
            listen(group, waste)
        if waste is not None and group.kind == "train":
            for trajectory in group.trajectories.values():
                self.waste_trajectory(trajectory.facts, waste)
