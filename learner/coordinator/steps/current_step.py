"""The step under way: which groups it trains on, what each rank is answered, and how it is accounted when it ends.

The groups stay open until the step is done with them.
"""

from collections.abc import Iterable, Sequence

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.steps.step_batch import StepBatch, build_step
from learner.coordinator.steps.step_lines import StepLines
from learner.coordinator.window import StalenessWindow
from learner.live.alarms import HealthWatch
from protocol.errors import FrameError
from protocol.failpoints import failpoint
from protocol.settings.settings import Settings
from protocol.wire import messages as m

_ANSWER_WITHIN_S = 1.0
# Servers say each second which weights they hold; a push that has just ended may not have been told of yet.
_PUSH_AGAIN_AFTER_S = 3.0


class CurrentStep:
    """`step`, `policy_version`: of the last step that ended. detail: what the run is doing, for people."""

    def __init__(
        self,
        settings: Settings,
        groups: OpenGroups,
        window: StalenessWindow,
        lines: StepLines,
        accounts: Accounts,
        last_step: int,
        policy_version: int,
    ) -> None:
        self.step = last_step
        self.policy_version = policy_version
        self.detail = "starting"
        self.stop_reason: str | None = None
        self._settings = settings
        self._groups = groups
        self._window = window
        self._lines = lines
        self._ledger = accounts.ledger
        self._mailbox = accounts.mailbox
        self._tally = accounts.tally
        self._health = HealthWatch(settings.health)
        self._batch: StepBatch | None = None
        self._waiting: dict[int, tuple[str, m.NextBatch, float]] = {}
        self._lacking_since: float | None = None

    @property
    def is_under_way(self) -> bool:
        return self._batch is not None

    @property
    def sick_reason(self) -> str | None:
        """Why the run is to end by health.stop_after; None while it is not."""
        return self._health.stop_reason

    @property
    def leasable_versions(self) -> range:
        """Policy versions that a server may hold to get a lease: [v], or [v, v + 1] while a step runs, because rank 0
        pushes v + 1 before it reports the step. Older: the sample would start stale. Newer: weights of a start that was
        lost, on a server that this start has not synced yet."""
        return range(self.policy_version, self.policy_version + self.is_under_way + 1)

    def on_next_batch(self, peer: str, message: m.NextBatch, now: float) -> None:
        """Have a rank wait for its share. Raises: FrameError for a rank or a step that this run has no share for."""
        num_ranks = self._settings.learner.num_ranks
        if message.rank >= num_ranks:
            raise FrameError("$.rank", f"is {message.rank}, this run has {num_ranks} ranks", "rank")
        if message.step <= self.step:
            raise FrameError("$.step", f"is {message.step}, step {self.step} is done", "step")
        self._waiting[message.rank] = (peer, message, now)

    def answer_ranks(self, now: float, absent: Sequence[str] = ()) -> None:
        """Give every rank that waits its share, or the end of the run, or after a second the word to ask again.

        absent: the servers that cannot be reached: the step's push leaves them out.

        No rank gets either while a step's line is held back: one that did would wait for the others in a collective.
        """
        if (waits_for := self._lines.settle()) is not None:
            self.detail = f"waits for {waits_for}"
        is_asked = any(message.step == self.step + 1 for _, message, _ in self._waiting.values())
        if is_asked and self._batch is None and not self.stop_reason and waits_for is None:
            self._assign()
        for rank, (peer, message, since) in list(self._waiting.items()):
            if self._batch is not None and self._batch.step == message.step:
                run_id, incarnation = self._mailbox.run_id, self._mailbox.incarnation
                share, buffers = self._batch.share_of(rank, run_id, incarnation, message.request, absent)
                self._mailbox.send(peer, share, buffers)
            elif self._has_ended(message.step):
                self._mailbox.end(peer, message.request, message.step, self.stop_reason or "all steps are done")
            elif now - since > _ANSWER_WITHIN_S:
                self._mailbox.put_off(peer, message.request, self.detail, is_for_evaluation=waits_for is not None)
            else:
                continue
            del self._waiting[rank]

    def note_servers(self, are_lacking: bool, now: float) -> None:
        """Note since when no server has held the current weights."""
        if not are_lacking:
            self._lacking_since = None
        elif self._lacking_since is None:
            self._lacking_since = now

    def push_again(self, now: float) -> None:
        """Have all ranks push their weights again, when no server holds them.

        The next step's push would bring them to a server that was started again, but that step needs its samples first.
        """
        is_due = self._lacking_since is not None and now - self._lacking_since >= _PUSH_AGAIN_AFTER_S
        # A push is a work of all ranks: none may be elsewhere.
        if not is_due or len(self._waiting) < self._settings.learner.num_ranks:
            return
        for peer, question, _ in self._waiting.values():
            self._mailbox.push_again(peer, question.request, question.step)
        self._waiting.clear()
        self._lacking_since = now

    def _assign(self) -> None:
        """Choose the next step's groups, if the window lets it."""
        if self.step >= self._settings.run.max_steps:
            return
        if self._groups.num_ready < self._window.groups_per_step:
            self.detail = f"step {self.step + 1} waits for {self._missing(self._groups.training)}"
            return
        outstanding = self._groups.outstanding(self.policy_version)
        choice = self._window.choose(outstanding, self.policy_version, self._settings.learner.stale_policy)
        if not choice.groups:
            self.detail = f"step {self.step + 1} waits for {self._missing(choice.awaited)}"
            return
        groups = self._groups.assign(choice.groups, self.step + 1)
        self._batch = build_step(self.step + 1, self.policy_version, groups, self._settings.learner)
        self.detail = f"step {self._batch.step} is training"

    def _missing(self, names: Iterable[str]) -> str:
        awaited = [group for group in map(self._groups.training.__getitem__, names) if not group.is_ready]
        servers: set[str] = set()
        for group in awaited:
            servers.update(group.holders.values())
        if not servers:
            return "a server with the current weights"
        return f"{len(awaited)} groups on {', '.join(sorted(servers))}"

    def _has_ended(self, step: int) -> bool:
        last, held = self._settings.run.max_steps, self._lines.held_step
        if self._batch is not None or (held is not None and (not self.stop_reason or held >= last)):
            return False
        return self.stop_reason is not None or step > last

    def finish(self, message: m.Stepped) -> None:
        """Account the step under way and record it; a step that is told of again changes nothing."""
        batch = self._batch
        if batch is None or batch.step != message.step:
            return
        self._batch = None
        self.step = message.step
        failpoint("step_book.before_account")
        self._account(batch, message)
        failpoint("step_book.after_account")
        metrics = self._metrics(batch, message)
        self._health.take(metrics)
        self._lines.add(metrics | {"alarms": len(self._health.active)}, batch)
        failpoint("step_book.after_record")

    def _account(self, batch: StepBatch, message: m.Stepped) -> None:
        """Account a step's groups as trained, or as skipped when the step was not applied; free their slots."""
        if message.is_applied:
            self._groups.train(batch.groups, batch.step, batch.policy_version)
        else:
            self._groups.skip_step(batch.groups, batch.step, message.detail)
        self.policy_version = message.policy_version
        self._ledger.set_meta("policy_version", str(message.policy_version))

    def _metrics(self, batch: StepBatch, message: m.Stepped) -> dict[str, float]:
        return {
            "step": message.step,
            "policy_version": message.policy_version,
            **batch.metrics(self._settings.rewards.combine),
            **message.metrics,
            **self._groups.filtered_of_step,
            "window_used": len(self._groups.training) + len(batch.groups),
            "skipped": self._tally.skipped,
            "retried": self._tally.retried,
        }
