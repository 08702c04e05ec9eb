"""The coordinator's decisions: which prompt goes to which server, what trains next, and what the ledger records.

A state machine without sockets or threads: messages in through `receive`, messages out through `take_outgoing`.

The steps of a trajectory:

    1 a prompt becomes a group          PromptSource.take, OpenGroups.next_group
    2 its samples are leased            Leases.lease_all -> message Lease
    3 a server makes them               (rollout/) -> TrajectoryDone, SampleFailed
    4 each is checked and kept          Leases.receive, OpenGroups.accept -> Ack
    5 lost, late, failed: leased again  LeaseRecall, OpenGroups.fail and release
    6 ready groups become a step        CurrentStep.answer_ranks, OpenGroups.assign -> Batch, a share for each rank
    7 ranks train and push the weights  (rank/) -> StepEnd
    8 the ledger records the step       CurrentStep.finish, OpenGroups.train -> GroupsTrained, a line of metrics
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.coordinator.accounts import Accounts, Mailbox
from learner.coordinator.changes import begin_start
from learner.coordinator.groups.born_ready import BornReady
from learner.coordinator.groups.curriculum import Curriculum
from learner.coordinator.groups.eval_scores import HeldOutSet
from learner.coordinator.groups.evaluations import Evaluations, EvaluationSchedule
from learner.coordinator.groups.kept_turns import KeptTurns
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.groups.prompt_source import PromptSource
from learner.coordinator.groups.score_filter import ScoreFilter
from learner.coordinator.groups.written_answers import WrittenAnswers
from learner.coordinator.leases import LeaseRecall, Leases, OverdueLimit
from learner.coordinator.servers import Servers
from learner.coordinator.steps.current_step import CurrentStep
from learner.coordinator.steps.record import RunRecord, StepLines
from learner.data.prompts import Prompt
from learner.data.sft_rows import RowEncoder
from learner.data.window import StalenessWindow
from learner.disk.run_folder import TOKENS
from learner.disk.token_books import TABLES, TokenBooks
from learner.ledger.ledger import Ledger, terms_of
from learner.ledger.snapshots import LedgerCopies
from learner.live.status import RunStatus
from protocol.disk.files import aside_of
from protocol.errors import FrameError
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from protocol.wire.codec import SampleStamp

_log = logging.getLogger(__name__)
_PING_EVERY_S = 1.0
_MOST_PINGS = 64  # of one turn of the loop


class Coordinator:
    """One run's accounts. `now` arguments are monotonic seconds.

    `has_more_to_do`: the next turn has work without a message.
    """

    has_more_to_do = False
    _to_ping: Sequence[str] = ()  # servers that this second's pings have not reached yet

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        ledger: Ledger,
        train: Sequence[Prompt],
        held_out: Sequence[HeldOutSet],
        record: RunRecord,
        last_step: int,
        copies: LedgerCopies | None = None,
        vocab_size: int | None = None,
        encoder: RowEncoder | None = None,
        answers: WrittenAnswers | None = None,
        services: Mapping[str, str] | None = None,
    ) -> None:
        """last_step: the step of the checkpoint that the run resumes from, 0 for a new run.

        copies: copies of this ledger; by default each is made at once, which blocks.
        answers: of a run that writes them in place of scores. services: as of `CoordinatorProcess`.
        encoder: of the rows that are learnt without generating; None: servers make the samples.
        vocab_size: the policy's; trajectories with other tokens are refused. None: any token is accepted.
        """
        self.run_id = run_id
        # The version is smaller than the step after steps that were not applied: only the ledger has their number.
        policy_version = int(ledger.meta("policy_version") or last_step)
        self.incarnation = ledger.begin_incarnation(policy_version)
        ledger.begin_terms(last_step + 1, {**terms_of(settings), "run": run_id})
        changes = begin_start(ledger, settings, held_out, last_step + 1, self.incarnation, services or {})
        accounts = Accounts(ledger, Mailbox(run_id, self.incarnation))
        self._ledger, self._notices, self._record = ledger, changes.notices, record
        self._mailbox, self._counts, self._streaks = accounts.mailbox, accounts.counts, accounts.streaks
        self._window = window = StalenessWindow(settings.learner.groups_per_step, settings.learner.max_staleness)
        self._servers = Servers()
        self._source = source = PromptSource(train, settings, ledger, last_step)
        self._groups = groups = OpenGroups(source, window, accounts)
        scores = Evaluations(held_out, groups.open_evaluation, record.decoder, settings.eval.solved_at)
        self._evaluations = scores if answers is None else answers.attached_to(groups)
        groups.on_closed.append(self._evaluations.on_closed)
        self._books = _attach_features(settings, source, groups, accounts)
        self._turns = KeptTurns(groups, window, accounts, settings.rollout.max_context_tokens, vocab_size)
        overdue = OverdueLimit(settings.rollout.lease_timeout_s)
        self._leases = Leases(groups, self._servers, overdue, accounts, settings.run.seed, vocab_size, self._turns)
        self._rows = None if encoder is None else BornReady(groups, source, encoder, accounts)
        self._recall = LeaseRecall(groups, self._leases, self._servers, overdue, accounts)
        since, schedule = changes.comparable_since, _schedule_of(settings)
        lines = StepLines(record, self._evaluations, schedule, ledger, last_step, policy_version, since)
        self._steps = CurrentStep(settings, groups, window, lines, accounts, last_step, policy_version)
        self._give_up_reason: str | None = None
        self._pinged_at, self._is_copying = float("-inf"), False
        self._copies = copies or LedgerCopies(ledger.begin_copy)

    @property
    def step(self) -> int:
        """The last step that ended."""
        return self._steps.step

    @property
    def policy_version(self) -> int:
        """The policy version after the last step."""
        return self._steps.policy_version

    @property
    def is_ending_step(self) -> bool:
        """Whether the end of a step is recorded in part: `advance` records the rest in the next turns."""
        return self._steps.is_ending

    @property
    def counts(self) -> Counter[str]:
        """The numbers of events in this start of the run, above zero, by the names of `Accounts.counts`."""
        return +self._counts

    # -- in and out ---------------------------------------------------------------------------------------------------

    def receive(self, peer: str, message: m.Message, buffers: list[bytes], now: float) -> None:
        """Process one message. A message of another run or start is answered and counted, and not used."""
        if not self._mailbox.is_ours(message):
            self._refuse_stranger(peer, message)
            return
        if isinstance(message, m.FromServer):
            self._receive_from_server(peer, message, buffers, now)
            return
        try:
            match message:
                case m.NextBatch():
                    self._steps.on_next_batch(peer, message, now)
                case m.StepEnd():
                    self._steps.finish(peer, message, self._servers)
                case m.SaveLedger():
                    self._save_ledger(peer, message)
        except FrameError as error:
            self.refuse(peer, error, message.request)

    def refuse(self, peer: str, error: FrameError, request: int = 0, sample: SampleStamp | None = None) -> None:
        """Count a frame that is not a valid message, and tell its sender why.

        sample: the sample that the frame is a result of, if it says so. Without its name in the answer, the server
        would send the result again, for ever.
        """
        self._counts[f"refused:{error.reason}"] += 1
        if sample is not None and (sample.run_id, sample.incarnation) == (self.run_id, self.incarnation):
            self._leases.refuse(peer, sample, error)
        else:
            self._mailbox.refuse(peer, str(error), error.reason, request)

    def on_undeliverable(self, peer: str, message: m.Message, now: float) -> None:
        """Take back the lease that found no connection, and everything of a server that has had none for 4 s."""
        self._counts["undeliverable"] += 1
        if isinstance(message, m.Lease):
            self._recall.undo_lease(message.group, peer)
        if self._servers.note_unreachable(peer, now):
            self._servers.forget_state(peer)
            self._recall.take_back_unreachable(peer, f"{peer} has no connection")

    def advance(self, now: float) -> None:
        """Recall leases, assign a step, answer ranks, lease groups and commit; called once per turn of the loop.

        Raises: OperatorError when the ledger, or a copy of it, cannot be written.
        """
        if self._is_copying:
            for peer, request in self._copies.take_finished():
                self._mailbox.confirm(peer, request)
            self._is_copying = self._copies.has_pending
        self._steps.go_on()
        self._recall.expire(self._steps.leasable_versions, now)
        reasons = self._groups.give_up_reason, self._streaks.give_up_reason, self._steps.unhealthy_reason
        for reason in reasons:
            if reason is not None:
                self.give_up(reason)
        if not self._steps.is_whole:
            self._groups.drop_stale(self._steps.policy_version)
        self._steps.answer_ranks(self._servers, now)
        self._steps.push_again(self._servers.all_lack_weights(self._steps.leasable_versions), now)
        # A slot that the ending step frees is of the next version: no server has it before the end is recorded.
        is_admitting, is_leasing = not (self._steps.stop_reason or self._steps.is_ending), False
        if self._rows is not None:
            self._rows.fill(self._steps.policy_version, is_admitting, now)
        else:
            is_leasing = self._leases.lease_all(self._steps.leasable_versions, is_admitting=is_admitting, now=now)
        self.has_more_to_do = is_leasing or self._steps.has_more_to_do
        self._ping(now)
        if not self.is_ending_step:
            self._ledger.commit()

    def _ping(self, now: float) -> None:
        """Ping each server once in a second, a part of them in each turn."""
        if not self._to_ping and now - self._pinged_at >= _PING_EVERY_S:
            self._pinged_at = now
            self._to_ping = list(self._servers.newest_leases())
        names, self._to_ping = self._to_ping[:_MOST_PINGS], self._to_ping[_MOST_PINGS:]
        if names:
            self._mailbox.ping(self._servers.newest_leases(names))

    def take_outgoing(self) -> list[tuple[str, m.Message, list[bytes]]]:
        """Return (peer, message, buffers) to send, and forget them. Nothing is sent that is not committed."""
        return [] if self.is_ending_step else self._mailbox.take()

    def stop_after_step(self, reason: str) -> None:
        """Let the running step finish and start no other: ranks get `Ended` instead of their next batch."""
        self._steps.stop_reason = self._steps.stop_reason or reason

    def give_up(self, reason: str) -> None:
        """End the run as `stop_after_step` does, by a rule of its settings: its command shows the reason and fails."""
        self._give_up_reason = self._give_up_reason or reason
        self.stop_after_step(reason)

    def lose_server(self, server: str, reason: str) -> None:
        """Take back the samples of a server that died, which counts against its samples."""
        self._ledger.add_event("server_lost", f"{server}: {reason.removeprefix(f'{server}: ')}")
        self._forget_server(server, reason)

    def _forget_server(self, server: str, reason: str) -> None:
        self._servers.forget_state(server)
        self._recall.take_back_from(server, reason)

    def status(self) -> RunStatus:
        return RunStatus(
            step=self.step,
            policy_version=self.policy_version,
            window_used=len(self._groups.training),
            window_size=self._window.size,
            ready=self._groups.num_ready,
            detail=self._steps.detail,
            evaluation=self._evaluations.status(),
            servers=self._servers.status(),
            counts=dict(self.counts),
            give_up_reason=self._give_up_reason,
            notices=(*self._notices, *self._streaks.notices),
        )

    # -- messages of peers --------------------------------------------------------------------------------------------

    def _refuse_stranger(self, peer: str, message: m.Message) -> None:
        self._counts["refused:incarnation"] += 1
        detail = (
            f"this is run {self.run_id}, start {self.incarnation}; "
            f"your message is of run {message.run_id}, start {message.incarnation}"
        )
        self._mailbox.refuse(peer, detail, "incarnation", message.request)

    def _receive_from_server(self, server: str, message: m.FromServer, buffers: list[bytes], now: float) -> None:
        self._servers.note(server)
        if not isinstance(message, m.Hello):
            self._recall.note_alive(server)
        match message:
            case m.Hello():
                self._forget_server(server, f"{server} started again")
                self._servers.note_hello(server, message)
                self._mailbox.confirm(server)
            case m.Demand():
                if self._servers.note_demand(server, message):
                    self._recall.take_back_lost(server, message.heard_of_lease, message.leases)
            case m.Heartbeat():
                self._servers.note_heartbeat(server, message)
            case m.TrajectoryDone():
                self._leases.receive(server, message.facts, buffers, self._steps.leasable_versions, now)
            case m.TurnsDone():
                self._turns.receive(server, message, buffers, self._steps.leasable_versions)
            case m.SampleFailed():
                self._leases.receive_failure(server, message)
            case m.TokensCounted():
                self._books.receive(server, message)
                self._mailbox.confirm(server, message.request)

    def _save_ledger(self, peer: str, message: m.SaveLedger) -> None:
        """Copy the ledger to a path inside the run's folder only: any peer can send this message."""
        self._steps.complete()  # a copy commits
        path = Path(message.path)
        is_new = not self._copies.has_request(path, message.request)
        if is_new and not _is_file_inside(path, self._record.folder):
            raise FrameError("$.path", f"{message.path[:500]} is not a new file inside {self._record.folder}", "path")
        self._copies.request_copy(peer, path, message.request)
        self._is_copying = True
        if not is_new and self._copies.is_making:
            # A repeated request: a disk may need minutes for a ledger of many gigabytes.
            self._mailbox.put_off(peer, message.request, f"the ledger is being copied to {path}")


def _schedule_of(settings: Settings) -> EvaluationSchedule:
    evals = settings.eval
    every = 0 if settings.is_of_rows else evals.every_steps  # ranks score held-out rows
    return EvaluationSchedule(every, settings.run.max_steps, evals.pin, evals.before)


def _attach_features(settings: Settings, source: PromptSource, groups: OpenGroups, accounts: Accounts) -> TokenBooks:
    """Attach the optional features that only listen: each is one file, and a line here. Returns the token books."""
    if settings.filter.dynamic_sampling:
        ScoreFilter(settings, groups, accounts).attach()
    if settings.data.curriculum.is_on:
        Curriculum(settings, accounts.ledger).attach(source, groups)
    books = TokenBooks(accounts.ledger.attach(TOKENS, "books", TABLES))
    groups.on_unused.append(books.note_unused)
    return books


def _is_file_inside(path: Path, folder: Path) -> bool:
    """Return whether a path is, or can become, a file below this folder, but not one of the folder's own files."""
    try:
        path, folder = path.resolve(), folder.resolve()
        aside = aside_of(path)  # written first, whatever has that name
        is_own = path.parent == folder and (path.exists() or aside.exists())
        is_folder = path.is_dir() or aside.is_dir()
        return folder in path.parents and path.parent.is_dir() and not is_folder and not is_own
    except (OSError, ValueError):  # too long a name; a NUL inside
        return False
