"""The coordinator's decisions: which prompt goes to which server, what trains next, what is accounted as what.

A state machine without sockets or threads: messages in through `receive`, messages out through `take_outgoing`. Driven
by `learner.coordinator_loop`. Reading order of a group's life: _lease_groups, _on_trajectory, _on_next, _on_stepped.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.evaluation import Evaluation, start_evaluation
from learner.groups import Group
from learner.ledger import Ledger
from learner.prompt_order import PromptOrder
from learner.prompts import Prompt
from learner.run_record import RunRecord
from learner.step_batch import StepBatch, build_step
from learner.window import Outstanding, StalenessWindow
from protocol import messages as m
from protocol.settings import Settings
from protocol.trajectory import FrameError, Trajectory, TrajectoryFacts


@dataclass
class Peer:
    """A rollout server as the coordinator knows it."""

    policy_version: int | None = None
    num_wanted: int = 0
    heard_at: float = 0.0
    heartbeat: m.Heartbeat | None = None


class Coordinator:
    """One run's accounts. `now` arguments are monotonic seconds."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        ledger: Ledger,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
        record: RunRecord,
        last_step: int,
    ) -> None:
        """last_step: the step of the checkpoint that the run resumes from, 0 for a new run."""
        self.run_id = run_id
        self.incarnation = ledger.begin_incarnation()
        self.counts: Counter[str] = Counter()
        # A step that was not applied leaves the version behind the step's number: only the ledger knows by how many.
        self.policy_version = int(ledger.meta("policy_version") or last_step)
        self.step = last_step
        self.detail = "starting"
        self._settings = settings
        self._ledger = ledger
        self._train = train
        self._held_out = held_out[: settings.eval.num_prompts]
        self._record = record
        self._window = StalenessWindow(settings.learner.groups_per_step, settings.learner.max_staleness)
        self._order = PromptOrder(len(train), settings.run.seed)
        self._position = int(ledger.meta("position") or 0)
        self._recalled = deque(ledger.recall_unfinished())
        self._by_uid = {prompt.uid: prompt for prompt in train} if self._recalled else {}
        self._groups: dict[str, Group] = {}
        self._to_lease: deque[Group] = deque()
        self._evaluations: dict[int, Evaluation] = {}
        self._batch: StepBatch | None = None
        self._peers: dict[str, Peer] = {}
        self._waiting_ranks: dict[int, tuple[str, m.NextBatch, float]] = {}
        self._outgoing: list[tuple[str, m.Message, list[bytes]]] = []
        self._stop_reason: str | None = None
        self._num_left = (settings.run.max_steps - last_step) * settings.learner.groups_per_step

    # -- in and out ---------------------------------------------------------------------------------------------------

    def receive(self, peer: str, message: m.Message, buffers: list[bytes], now: float) -> None:
        """Take in one message. What a stranger to this run sends is answered, counted and used for nothing."""
        if (message.run_id, message.incarnation) != (self.run_id, self.incarnation):
            self.counts["refused:incarnation"] += 1
            detail = (
                f"this is run {self.run_id}, start {self.incarnation}; "
                f"you speak of run {message.run_id}, start {message.incarnation}"
            )
            self._send(peer, m.Refused(run_id=self.run_id, incarnation=self.incarnation, detail=detail))
            return
        match message:
            case m.Hello():
                self._on_hello(peer, message, now)
            case m.Demand():
                self._peer(peer, now).num_wanted = message.num_groups
                self._peer(peer, now).policy_version = message.policy_version
            case m.TrajectoryDone():
                self._on_trajectory(peer, message, buffers, now)
            case m.SampleFailed():
                self._on_failed(peer, message, now)
            case m.Heartbeat():
                self._peer(peer, now).heartbeat = message
                self._peer(peer, now).policy_version = message.policy_version
            case m.NextBatch():
                self._on_next(peer, message, now)
            case m.Stepped():
                self._on_stepped(peer, message)
            case m.Evaluate():
                self._on_evaluate(peer, message)
            case m.EvalPoll():
                self._on_eval_poll(peer, message)
            case m.SaveLedger():
                self._ledger.snapshot(Path(message.path))
                self._send(peer, self._done())

    def refuse(self, peer: str, error: FrameError) -> None:
        """Count a frame that is no valid message, and tell its sender why."""
        self.counts[f"refused:{error.reason}"] += 1
        self._send(peer, m.Refused(run_id=self.run_id, incarnation=self.incarnation, detail=str(error)[:2000]))

    def advance(self, now: float) -> None:
        """Do what time and the latest messages allow: expire, assign a step, answer ranks, lease."""
        self._expire(now)
        self._answer_ranks(now)
        self._lease_groups(now)
        self._ledger.commit()

    def take_outgoing(self) -> list[tuple[str, m.Message, list[bytes]]]:
        """Return (peer, message, buffers) to send, and forget them."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def stop_after_step(self, reason: str) -> None:
        """Let the step under way finish and start no other: the ranks hear `Ended` in place of their next batch."""
        self._stop_reason = self._stop_reason or reason

    def lose_server(self, server: str, reason: str, num_wanted: int = 0) -> None:
        """Take back what a server held, because it died or started again."""
        peer = self._peers.setdefault(server, Peer())
        peer.num_wanted, peer.policy_version = num_wanted, None
        for group in self._open_groups():
            if group.take_back_from(server):
                self._release(group, reason)

    def status(self) -> dict[str, object]:
        """Return what a live view shows."""
        ready = sum(group.is_ready for group in self._groups.values())
        evaluation = next((e for e in self._evaluations.values() if not e.is_done), None)
        return {
            "step": self.step,
            "policy_version": self.policy_version,
            "window_used": len(self._groups),
            "window_size": self._window.size,
            "ready": ready,
            "skipped": self.counts["skipped"],
            "retried": self.counts["retried"],
            "detail": self.detail,
            "evaluation": None if evaluation is None else f"{len(evaluation.finished)}/{len(self._held_out)}",
            "servers": {name: peer.heartbeat and _beat(peer.heartbeat) for name, peer in self._peers.items()},
            "counts": dict(self.counts),
        }

    # -- rollout servers ----------------------------------------------------------------------------------------------

    def _on_hello(self, peer: str, message: m.Hello, now: float) -> None:
        self.lose_server(peer, f"{peer} started again")
        self._peer(peer, now).policy_version = message.policy_version
        self._send(peer, self._done())

    def _on_trajectory(self, peer: str, message: m.TrajectoryDone, buffers: list[bytes], now: float) -> None:
        self._peer(peer, now)
        facts = message.facts
        group = self._find(facts.group)
        if group is None:
            self.counts["duplicate"] += 1
            self._ack(peer, facts.group, facts.sample_index, "unknown")
            return
        try:
            trajectory = Trajectory.from_buffers(facts, buffers, "$.facts")
            self._check_lease(group, facts, peer)
        except FrameError as error:
            self.counts[f"rejected:{error.reason}"] += 1
            self._ack(peer, facts.group, facts.sample_index, "rejected", str(error))
            if group.holders.get(facts.sample_index) == peer:
                self._fail(group, facts.sample_index, f"trajectory refused: {error}")
            return
        if not group.receive(trajectory):
            self.counts["duplicate"] += 1
            self._ack(peer, facts.group, facts.sample_index, "duplicate")
            return
        self._ack(peer, facts.group, facts.sample_index, "accepted")
        self._ledger.add_trajectory(facts, self.incarnation)
        if group.is_ready:
            self._close_if_evaluation(group)
            if group.kind == "train":
                self._ledger.set_state([group.name], "ready")

    def _check_lease(self, group: Group, facts: TrajectoryFacts, peer: str) -> None:
        """Raise FrameError when a trajectory is not what its server was asked for, or of weights that do not exist."""
        if (problem := group.contradiction(facts, peer)) is not None:
            raise FrameError("$.facts", problem, "lease")
        if facts.newest_version > self._newest_version:
            problem = f"has version {facts.newest_version}, the learner is at {self.policy_version}"
            raise FrameError("$.facts.version_spans", problem, "version")

    def _on_failed(self, peer: str, message: m.SampleFailed, now: float) -> None:
        self._peer(peer, now)
        self._ack(peer, message.group, message.sample_index, "returned")
        group = self._find(message.group)
        if group is not None and group.holders.get(message.sample_index) == peer:
            self.counts[f"failed:{message.boundary}"] += 1
            self._fail(group, message.sample_index, f"{message.boundary}: {message.detail}")

    def _fail(self, group: Group, sample_index: int, reason: str) -> None:
        group.fail(sample_index, reason)
        self._ledger.add_event("failed", f"{group.name}[{sample_index}] {reason}")
        if (why := group.dead_letter) is not None:
            self._skip(group, why)
        else:
            self._release(group, reason)

    def _release(self, group: Group, reason: str) -> None:
        """Queue the group's missing samples for another lease; its finished ones are kept."""
        self.counts["retried"] += 1
        queue = self._evaluation_of(group).to_lease if group.kind == "eval" else self._to_lease
        if group not in queue:
            queue.append(group)
        if group.kind == "train":
            self._ledger.set_state([group.name], "pending", reason=reason[:500])

    def _skip(self, group: Group, reason: str) -> None:
        """Give a prompt up, with its reason in the ledger. Its slot is free for another prompt."""
        self.counts["skipped"] += 1
        if group.kind == "eval":
            self._close_if_evaluation(group)
            return
        self._num_left += 1
        self._groups.pop(group.name)
        self._ledger.set_state([group.name], "skipped", reason=reason[:2000])
        self._send_trained([group])

    def _expire(self, now: float) -> None:
        """Take back leases that outlived their time, and groups that no step could use any more."""
        limit_s = self._settings.rollout.lease_timeout_s
        for group in self._open_groups():
            if group.holders and now - group.leased_at > limit_s:
                self._expire_lease(group, f"lease expired after {limit_s:g} s")
        if self._batch is not None:
            return
        for name in self._window.too_old(self._outstanding(), self.policy_version):
            group = self._groups[name]
            self.counts["dropped:stale"] += 1
            group.restart()
            self._ledger.forget_trajectories(name)
            self._release(group, f"too old at policy version {self.policy_version}")

    def _expire_lease(self, group: Group, reason: str) -> None:
        """Count every sample that is still out as failed: a prompt that never comes back is not leased for ever."""
        for index, server in list(group.holders.items()):
            group.fail(index, f"{reason} on {server}")
        self._ledger.add_event("expired", f"{group.name} {reason}")
        if (why := group.dead_letter) is not None:
            self._skip(group, why)
        else:
            self._release(group, reason)

    def _lease_groups(self, now: float) -> None:
        while (server := self._next_server()) is not None and (group := self._next_group()) is not None:
            peer = self._peers[server]
            assert peer.policy_version is not None
            peer.num_wanted -= 1
            lease = group.lease_to(
                server, peer.policy_version, now, self.run_id, self.incarnation, self._settings.run.seed
            )
            if group.kind == "train":
                self._ledger.lease(group.name, group.epoch, group.prompt.uid, group.position, server, group.attempt)
            self._send(server, lease)

    def _next_server(self) -> str | None:
        """Return the server that wants most. One that does not hold the current weights gets nothing: a sample begun on
        older ones would count against the staleness bound from the start. Weights newer than any are those of a lost
        lineage: this start of the run has not synced that server yet."""
        able = [
            (peer.num_wanted, name)
            for name, peer in self._peers.items()
            if peer.num_wanted > 0
            and peer.policy_version is not None
            and self.policy_version <= peer.policy_version <= self._newest_version
        ]
        return max(able)[1] if able else None

    def _next_group(self) -> Group | None:
        for evaluation in self._evaluations.values():
            while evaluation.to_lease:
                group = evaluation.to_lease.popleft()
                if group.name in evaluation.open and group.missing:
                    return group
        while self._to_lease:
            group = self._to_lease.popleft()
            if group.name in self._groups and group.missing:
                return group
        if self._stop_reason or self._num_left <= 0 or not self._window.num_free(len(self._groups)):
            return None
        self._num_left -= 1
        group = self._recall() or self._admit()
        self._groups[group.name] = group
        return group

    def _recall(self) -> Group | None:
        while self._recalled:
            old = self._recalled.popleft()
            prompt = self._by_uid.get(old.uid)
            if prompt is None:
                self._ledger.set_state([old.group], "skipped", reason="the data set no longer holds this prompt")
                continue
            samples = self._settings.rollout.group_size
            return Group(old.group, prompt, "train", old.epoch, old.position, samples, attempt=old.attempt)
        return None

    def _admit(self) -> Group:
        position = self._position
        epoch, index = self._order.at(position)
        self._position += 1
        self._ledger.set_meta("position", str(self._position))
        prompt = self._train[index]
        return Group(f"e{epoch}-{prompt.uid}", prompt, "train", epoch, position, self._settings.rollout.group_size)

    # -- learner ranks ------------------------------------------------------------------------------------------------

    def _on_next(self, peer: str, message: m.NextBatch, now: float) -> None:
        num_ranks = self._settings.learner.num_ranks
        if message.rank >= num_ranks:
            self.refuse(peer, FrameError("$.rank", f"is {message.rank}, this run has {num_ranks} ranks", "rank"))
        elif message.step <= self.step:
            self.refuse(peer, FrameError("$.step", f"is {message.step}, step {self.step} is done", "step"))
        else:
            self._waiting_ranks[message.rank] = (peer, message, now)

    def _answer_ranks(self, now: float) -> None:
        for rank, (peer, message, since) in list(self._waiting_ranks.items()):
            if message.step == self.step + 1 and self._batch is None and not self._stop_reason:
                self._assign()
            if self._batch is not None and self._batch.step == message.step:
                answer, buffers = self._batch.share_of(rank, self.run_id, self.incarnation)
                self._send(peer, answer, buffers)
            elif self._has_ended(message.step):
                detail = self._stop_reason or "all steps are done"
                self._send(
                    peer,
                    m.Ended(run_id=self.run_id, incarnation=self.incarnation, step=message.step, detail=detail),
                )
            elif now - since > 1.0:
                self._send(peer, m.Wait(run_id=self.run_id, incarnation=self.incarnation, detail=self.detail[:2000]))
            else:
                continue
            del self._waiting_ranks[rank]

    def _has_ended(self, step: int) -> bool:
        return self._batch is None and (self._stop_reason is not None or step > self._settings.run.max_steps)

    def _assign(self) -> None:
        """Choose the next step's groups, if the window lets it."""
        if self.step >= self._settings.run.max_steps:
            return
        choice = self._window.choose(self._outstanding(), self.policy_version, self._settings.learner.stale_policy)
        if not choice.groups:
            awaited = [self._groups[name] for name in choice.awaited]
            servers = sorted({server for group in awaited for server in group.holders.values()})
            missing = (
                f"{len(awaited)} groups on {', '.join(servers)}" if servers else "a server with the current weights"
            )
            self.detail = f"step {self.step + 1} waits for {missing}"
            return
        groups = [self._groups[name] for name in choice.groups]
        self._batch = build_step(self.step + 1, self.policy_version, groups, self._settings.learner)
        self._ledger.set_state(choice.groups, "assigned", self._batch.step)
        self.detail = f"step {self._batch.step} is training"

    def _on_stepped(self, peer: str, message: m.Stepped) -> None:
        batch = self._batch
        if batch is not None and batch.step == message.step:
            self._batch = None
            self.step = message.step
            self._finish(batch, message)
            self._record.write_step(self._metrics(batch, message))
            self._record.write_samples(batch)
        self._send(peer, self._done())

    def _finish(self, batch: StepBatch, message: m.Stepped) -> None:
        """Account a step's groups as trained, or as skipped when the step was not applied; free their slots."""
        names = [group.name for group in batch.groups]
        if message.is_applied:
            self._ledger.mark_trained(names, batch.step, batch.policy_version)
        else:
            self.counts["skipped"] += len(names)
            self._ledger.set_state(names, "skipped", batch.step, f"step not applied: {message.detail}")
            self._ledger.add_event("not_applied", f"step {batch.step}: {message.detail}")
        self.policy_version = message.policy_version
        self._ledger.set_meta("policy_version", str(message.policy_version))
        for group in batch.groups:
            self._groups.pop(group.name)
        self._send_trained(batch.groups)

    def _send_trained(self, groups: Sequence[Group]) -> None:
        """Tell the servers which finished trajectories they need not keep any longer."""
        by_server: dict[str, list[str]] = {}
        for group in groups:
            for server in {t.facts.server for t in group.trajectories.values()}:
                by_server.setdefault(server, []).append(group.name)
        for server, names in by_server.items():
            self._send(server, m.Trained(run_id=self.run_id, incarnation=self.incarnation, groups=names))

    def _metrics(self, batch: StepBatch, message: m.Stepped) -> dict[str, float]:
        return {
            "step": message.step,
            "policy_version": message.policy_version,
            **batch.metrics(),
            **message.metrics,
            "window_used": len(self._groups) + len(batch.groups),
            "skipped": self.counts["skipped"],
            "retried": self.counts["retried"],
        }

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _on_evaluate(self, peer: str, message: m.Evaluate) -> None:
        if message.step not in self._evaluations:
            # Rank 0 asks after its push and before it tells of the step: the servers may be ahead of the books.
            version = max([self.policy_version, *(p.policy_version or 0 for p in self._peers.values())])
            samples = self._settings.eval.samples
            self._evaluations[message.step] = start_evaluation(message.step, version, self._held_out, samples)
        self._send(peer, self._done())

    def _on_eval_poll(self, peer: str, message: m.EvalPoll) -> None:
        """Hand a finished evaluation to rank 0, which reports it with its step. Before the first step there is none to
        report it with: it gets a line of its own."""
        evaluation = self._evaluations.get(message.step)
        if evaluation is not None and not evaluation.is_done:
            detail = f"evaluation: {len(evaluation.finished)} of {len(self._held_out)} prompts are back"
            self._send(peer, m.Wait(run_id=self.run_id, incarnation=self.incarnation, detail=detail))
            return
        metrics = self._evaluations.pop(message.step).metrics() if evaluation is not None else {}
        if message.step == 0:
            self._record.write_step({"step": 0, "policy_version": self.policy_version, **metrics})
        self._send(
            peer, m.EvalResult(run_id=self.run_id, incarnation=self.incarnation, step=message.step, metrics=metrics)
        )

    def _evaluation_of(self, group: Group) -> Evaluation:
        return next(e for e in self._evaluations.values() if group.name in e.open)

    def _close_if_evaluation(self, group: Group) -> None:
        if group.kind == "eval":
            self._evaluation_of(group).close(group)

    # -- small things -------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> Group | None:
        group = self._groups.get(name)
        if group is not None:
            return group
        return next((e.open[name] for e in self._evaluations.values() if name in e.open), None)

    @property
    def _newest_version(self) -> int:
        """The newest version that exists: a step under way pushes its weights before it is told of."""
        return self.policy_version + (self._batch is not None)

    def _open_groups(self) -> list[Group]:
        return [*self._groups.values(), *(g for e in self._evaluations.values() for g in e.open.values())]

    def _outstanding(self) -> list[Outstanding]:
        # A group that waits for its next lease will be of the current weights.
        return [
            Outstanding(g.name, g.oldest_version if g.is_begun else self.policy_version, g.is_ready)
            for g in self._groups.values()
        ]

    def _peer(self, name: str, now: float) -> Peer:
        peer = self._peers.setdefault(name, Peer())
        peer.heard_at = now
        return peer

    def _ack(self, peer: str, group: str, sample_index: int, outcome: str, detail: str = "") -> None:
        self._send(
            peer,
            m.Ack(
                run_id=self.run_id,
                incarnation=self.incarnation,
                group=group,
                sample_index=sample_index,
                outcome=outcome,  # type: ignore[arg-type]
                detail=detail[:2000],
            ),
        )

    def _done(self) -> m.Done:
        return m.Done(run_id=self.run_id, incarnation=self.incarnation)

    def _send(self, peer: str, message: m.Message, buffers: list[bytes] | None = None) -> None:
        self._outgoing.append((peer, message, buffers or []))


def _beat(heartbeat: m.Heartbeat) -> dict[str, object]:
    return {
        "policy_version": heartbeat.policy_version,
        "running": heartbeat.num_running,
        "waiting": heartbeat.num_waiting,
        "generated_tokens": heartbeat.generated_tokens,
        "failures": heartbeat.failures,
        "at": time.time(),
    }
