"""The running step: which groups it trains on, the answers to the ranks, and its records when it ends.

Its groups stay open until the step has ended. If the ranks take parts, it begins with the groups that are ready.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from msgspec import UNSET, structs

from learner.coordinator.accounts import Accounts
from learner.coordinator.groups.group import Group
from learner.coordinator.groups.open_groups import OpenGroups
from learner.coordinator.servers import Servers
from learner.coordinator.steps.record import StepLines
from learner.coordinator.steps.step_batch import DataMetrics, StepBatch, build_step, join
from learner.data.window import StalenessWindow
from learner.live.alarms import HealthWatch
from protocol.errors import FrameError
from protocol.failpoints import failpoint
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory

_ANSWER_WITHIN_S = 1.0
# Groups that one turn of the loop chooses from, or samples of a step that it assigns, plans, sends to ranks or records;
# the next turn goes on.
_MOST_AT_ONCE = 1024
_FACTS_PER_SAMPLE = 16  # facts of other ranks' samples that take as long to send as a sample
# Time between two choices of a step's groups while the groups that the first one awaits are not back.
_CHOOSE_EVERY_S = 1.0
_MOST_NAMED = 64  # groups whose servers are named to users: a window has thousands
_MOST_REFUSED = 5  # steps in a row without a finite gradient; each costs its prompts
# Servers report the version of their weights each second; the report after a push may still be on its way.
_PUSH_AGAIN_AFTER_S = 3.0


class CurrentStep:
    """The last finished step and the running one, with the ranks that wait for their shares."""

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
        """last_step, policy_version: of the resumed checkpoint, or of a new run."""
        self.step = last_step  # last step that ended
        self.policy_version = policy_version  # policy version after that step
        self.parts: list[StepBatch] = []  # of the running step; empty: between steps
        # Versions of servers that get leases: [v], or [v, v + 1] once a step is whole, because rank 0 then pushes v + 1
        # before it reports the step. With older weights a sample would start stale. Newer ones are of a lost start, on
        # a server that this start has not synced yet.
        self.leasable_versions = range(policy_version, policy_version + 1)
        self._detail = "starting"
        # Groups that the next step waits for; empty: any; None: it does not wait for groups, and `_detail` says why.
        self._awaited: frozenset[str] | None = None
        self._choose_at = 0.0  # time of the next choice, unless an awaited group is ready before it
        self.stop_reason: str | None = None  # reason to end the run before its last step
        self.has_more_to_do = False  # True: the next turn goes on with a step's work, or answers more ranks
        self.is_ending = False  # True: the end of a step is recorded in part, which must not be committed
        self._work: Iterator[int] | None = None  # pieces of work under way, with the number of samples of each
        self._spent: list[Trajectory] = []  # of ended steps: freed in pieces, thousands at once would stop the loop
        self._settings = settings
        self._groups = groups
        self._window = window
        self._lines = lines
        self._ledger = accounts.ledger
        self._mailbox = accounts.mailbox
        self._counts = accounts.counts
        self._num_tokens = accounts.ledger.num_trained_tokens()
        self._health = HealthWatch(settings.health)
        self._num_refused = 0  # steps in a row that were not applied
        self._refusal = ""  # why the last of them was not
        self._num_ended = self._num_lost = 0  # steps since the start; those of them that were not applied
        self._note, self._told = accounts.streaks.note, set[bool]()
        self._waiting: dict[int, tuple[str, m.NextBatch, float]] = {}  # rank -> (peer, question, time of arrival)
        self._lacking_since: float | None = None  # time since which no server has the weights

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the run has to end by health.stop_after, or because no step is applied any more, or None."""
        if self._num_refused < _MOST_REFUSED:
            return self._health.stop_reason
        since = self.step - self._num_refused + 1
        return (
            f"No step since step {since} was applied: {self._refusal}. Lower learner.lr, and look for prompts or "
            "rewards out of the ordinary. A resume continues with the weights of the last step that was applied."
        )

    @property
    def detail(self) -> str:
        """What the run does or waits for, for users."""
        if self._awaited is None:
            return self._detail
        return f"step {self.step + 1} waits for {self._missing(self._awaited or self._groups.training)}"

    @property
    def is_whole(self) -> bool:
        """Whether a step is running and has all its groups."""
        return bool(self.parts) and self.parts[-1].is_last

    def on_next_batch(self, peer: str, message: m.NextBatch, now: float) -> None:
        """Queue a rank's question for its share. Raises: FrameError for a rank or a step that the run does not have."""
        num_ranks = self._settings.learner.num_ranks
        if message.rank >= num_ranks:
            raise FrameError("$.rank", f"is {message.rank}, this run has {num_ranks} ranks", "rank")
        if message.step <= self.step:
            raise FrameError("$.step", f"is {message.step}, step {self.step} is done", "step")
        self._waiting[message.rank] = (peer, message, now)

    def answer_ranks(self, servers: Servers, now: float) -> None:
        """Send every waiting rank its share, or the end of the run, or after a second the request to ask again.

        No step begins while a step's line is held back, and a run that is not stopped does not end. The step's push
        leaves out the servers without a connection.
        """
        self.has_more_to_do = self._work is not None
        if self._work is not None:
            return
        waits_for = None if self._lines.held is None else self._lines.settle()
        if waits_for is not None:
            self._detail, self._awaited = f"waits for {waits_for}", None
        if not self._waiting:
            return
        asked = [message for _, message, _ in self._waiting.values() if self._is_next(message)]
        if asked and not self.is_whole and not self.stop_reason and waits_for is None:
            self._assign(now, in_parts=asked[0].part is not UNSET)
            self.go_on()
            if self._work is not None:
                return
        detail, num_sent = "", 0
        for rank, (peer, message, since) in list(self._waiting.items()):
            part = message.part or 0
            if self.parts and self.parts[0].step == message.step and part < len(self.parts):
                if num_sent >= _MOST_AT_ONCE:
                    self.has_more_to_do = True
                    continue
                of_run = self._mailbox.run_id, self._mailbox.incarnation
                share, buffers = self.parts[part].share_of(rank, *of_run, message.request, servers.absent())
                self._mailbox.send(peer, structs.replace(share, facts=[]), buffers)
                num_sent += sum(map(len, share.micro_batches)) + len(share.planned) // _FACTS_PER_SAMPLE
            elif self._has_ended(message.step):
                self._mailbox.end(peer, message.request, message.step, self.stop_reason or self._last_word())
            elif now - since > _ANSWER_WITHIN_S:
                detail = detail or self.detail
                self._mailbox.put_off(peer, message.request, detail, is_for_evaluation=waits_for is not None)
            else:
                continue
            del self._waiting[rank]

    def _last_word(self) -> str:
        """Return why the run ends after its last step."""
        if not self._num_lost:
            return "all steps are done"
        return f"all steps are done, but {self._num_lost} of {self._num_ended} since the start were not applied"

    def push_again(self, are_weights_lacking: bool, now: float) -> None:
        """Have all ranks push their weights again when no server has held them for 3 s.

        The next step's push would reach a restarted server too, but that step needs the server's samples first.
        """
        if not are_weights_lacking:
            self._lacking_since = None
            return
        if self._lacking_since is None:
            self._lacking_since = now
        # All ranks take part in a push.
        if now - self._lacking_since < _PUSH_AGAIN_AFTER_S or len(self._waiting) < self._settings.learner.num_ranks:
            return
        for peer, question, _ in self._waiting.values():
            self._mailbox.push_again(peer, question.request, question.step)
        self._waiting.clear()
        self._lacking_since = now

    def _is_next(self, message: m.NextBatch) -> bool:
        """Return whether a rank asks for what comes after the last share of any rank."""
        return message.step == self.step + 1 and (message.part or 0) == len(self.parts)

    def go_on(self) -> None:
        """Do pieces of the work under way, until it ends or a turn's samples have had theirs."""
        del self._spent[-_MOST_AT_ONCE:]
        num_done = 0
        for num_samples in self._work or ():
            num_done += num_samples
            if num_done >= _MOST_AT_ONCE:
                self.has_more_to_do = True
                return
        self._work = None

    def complete(self) -> None:
        """Do the rest of the work under way."""
        while self._work is not None:
            self.go_on()

    def _assign(self, now: float, *, in_parts: bool) -> None:
        """Choose the groups of the next step, or of its next part, if the window allows it."""
        if self.step >= self._settings.run.max_steps:
            return
        num_taken = sum(len(part.groups) for part in self.parts)
        fewest = self._window.fewest(num_taken, in_parts=in_parts)
        if self._groups.num_ready < fewest:
            self._awaited = frozenset()
            self._groups.changed.clear()
            return
        if self._awaited and now < self._choose_at and self._awaited.isdisjoint(self._groups.changed):
            return
        self._groups.changed.clear()
        outstanding = self._groups.outstanding(self.policy_version)
        stale_policy = self._settings.learner.stale_policy
        choice = self._window.choose(outstanding, self.policy_version, stale_policy, num_taken, fewest)
        if not choice.groups:
            self._awaited, self._choose_at = frozenset(choice.awaited), now + _CHOOSE_EVERY_S
            return
        names = choice.groups
        if in_parts:  # a part of thousands of samples would stop the loop
            names = names[: max(fewest, _MOST_AT_ONCE // self._groups.training[names[0]].num_samples)]
        self._work = chain([len(outstanding)], self._begin(names, num_taken, in_parts=in_parts))

    def _begin(self, names: Sequence[str], num_taken: int, *, in_parts: bool) -> Iterator[int]:
        """Assign groups to the next step, plan their part of it, and encode their facts."""
        groups, per_step = [self._groups.training[name] for name in names], self._window.groups_per_step
        for some in _pieces(groups):
            self._groups.assign(some, self.step + 1)
            yield sum(group.num_samples for group in some)
        learner, are_whole = self._settings.learner, self._settings.is_of_rows
        is_last = num_taken + len(groups) == per_step
        may_be_empty = in_parts and not (is_last and all(part.is_empty for part in self.parts))
        of_step = self.step + 1, self.policy_version, groups, learner
        batch = build_step(*of_step, are_whole=are_whole, may_be_empty=may_be_empty)
        if in_parts:
            batch = replace(batch, part=len(self.parts), is_last=is_last)
        yield len(batch.trajectories)
        yield min(len(batch.trajectories), len(batch.encoded_facts))
        self.parts.append(batch)
        if self.is_whole:
            self._groups.count_step([group for part in self.parts for group in part.groups])
            self.leasable_versions = range(self.policy_version, self.policy_version + 2)
        self._detail, self._awaited = f"step {batch.step} is training", None

    def _missing(self, names: Iterable[str]) -> str:
        found = (self._groups.training.get(name) for name in names)
        awaited = list(islice((group for group in found if group and not group.is_ready), _MOST_NAMED + 1))
        servers = {server for group in awaited[:_MOST_NAMED] for server in group.holders.values()}
        if not servers:
            return "a server with the current weights"
        is_all = len(awaited) <= _MOST_NAMED
        which = f"{len(awaited)} groups on" if is_all else f"more than {_MOST_NAMED} groups, the oldest on"
        return f"{which} {', '.join(sorted(servers))}"

    def _has_ended(self, step: int) -> bool:
        """Return whether a rank that asks for `step` gets the end: the run is stopped, or all its steps are done.

        A held line delays the end, because it must be written. A stopped run waits only for the line of the last step.
        It does not wait for the groups that its running step lacks: the next start takes the step again.
        """
        last, held = self._settings.run.max_steps, self._lines.held
        is_running = self.is_whole or bool(self.parts and not self.stop_reason)
        if is_running or (held is not None and (not self.stop_reason or held.step >= last)):
            return False
        return self.stop_reason is not None or step > last

    def finish(self, peer: str, message: m.StepEnd, servers: Servers) -> None:
        """Record the end of the running step, then confirm it; a repeated message changes nothing.

        A large step takes several turns of the loop. Its records are committed together, with its last piece.
        """
        if self.is_ending:
            return
        if not self.is_whole or self.parts[0].step != message.step:
            self._mailbox.confirm(peer, message.request)
            return
        self._work, self.is_ending = self._end(peer, message, servers), True  # the next `advance` does it

    def _end(self, peer: str, message: m.StepEnd, servers: Servers) -> Iterator[int]:
        batch, num_parts = join(self.parts), len(self.parts)
        failpoint("step_book.before_account")
        yield from self._account(batch, message)
        failpoint("step_book.after_account")
        data = DataMetrics()
        for some in _pieces(batch.groups):
            data.add([trajectory for group in some for trajectory in group.in_order()], some)
            yield sum(group.num_samples for group in some)
        metrics = {"data/num_parts": num_parts} | self._metrics(batch, data, message) | servers.take_outside_share()
        self._health.take({"step": message.step, **metrics})
        metrics["health/alarms"] = len(self._health.active)
        yield len(batch.trajectories)
        self.parts, self.step, self.policy_version = [], message.step, message.policy_version
        self.leasable_versions = range(self.policy_version, self.policy_version + 1)
        self._lines.add(self.step, self.policy_version, metrics, batch)
        failpoint("step_book.after_record")
        self._mailbox.confirm(peer, message.request)
        self._spent += batch.trajectories
        self.is_ending = False

    def _account(self, batch: StepBatch, message: m.StepEnd) -> Iterator[int]:
        """Record a step's groups as trained, or as skipped when the step was not applied; free their slots."""
        self._num_refused = 0 if message.is_applied else self._num_refused + 1
        self._num_ended, self._num_lost = self._num_ended + 1, self._num_lost + (not message.is_applied)
        if message.detail and message.is_applied not in self._told:
            self._told.add(message.is_applied)
            self._note(_describe_refusal(batch.step, message))
        if message.is_applied:
            for some in _pieces(batch.groups):
                self._groups.train(some, batch.step, batch.policy_version)
                yield sum(group.num_samples for group in some)
        else:
            self._refusal = message.detail
            self._groups.skip_step(batch.groups, batch.step, message.detail)
        self._ledger.set_meta("policy_version", str(message.policy_version))

    def _metrics(self, batch: StepBatch, data: DataMetrics, message: m.StepEnd) -> dict[str, float]:
        of_batch = data.of_step(batch.policy_version, self._settings.rewards)
        if self._settings.is_of_rows:  # nothing was generated or scored
            of_batch = {name: each for name, each in of_batch.items() if name.startswith(("data/", "length/mean"))}
        if message.is_applied:
            self._num_tokens += int(of_batch["data/num_model_tokens"])
        return {
            **of_batch,
            **message.metrics,
            **self._groups.step_counts,
            "data/window_used": len(self._groups.training) + len(batch.groups),
            "progress/tokens": self._num_tokens,
            "data/skipped": self._counts["skipped"],
            "data/retried": self._counts["retried"],
            "data/failed": sum(count for name, count in self._counts.items() if name.startswith("failed:")),
        }


def _describe_refusal(step: int, message: m.StepEnd) -> str:
    """Return a notice of the first step that was not applied, or of the first one that was applied in part."""
    result = "was applied in part, and its prompts count as trained" if message.is_applied else "was not applied"
    counts = "policy/num_updates counts applied updates" if message.is_applied else "data/skipped counts such prompts"
    own = "An advantage, loss or correction of your own must be finite for every token"
    return f"Step {step} {result}: {message.detail}. This is said once; {counts}. {own}."


def _pieces(groups: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Cut the groups of a step into pieces of as many samples as one turn of the loop takes."""
    num_at_once = max(1, _MOST_AT_ONCE // groups[0].num_samples)
    return (groups[first : first + num_at_once] for first in range(0, len(groups), num_at_once))
