"""The coordinator as a state machine: scripts of messages in, exact messages out and exact books."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from learner.coordinator import Coordinator
from learner.ledger import Ledger
from learner.prompts import Prompt
from learner.run_record import RunRecord
from protocol import messages as m
from protocol.settings import Settings
from protocol.trajectory import FrameError, Trajectory
from tests.protocol.examples import make_trajectory

M = TypeVar("M", bound=m.Message)


def settings_of(**sections: dict[str, Any]) -> Settings:
    base: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 3},
        "rollout": {"group_size": 2, "lease_timeout_s": 100},
        "learner": {"groups_per_step": 2, "max_staleness": 1},
    }
    return Settings.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


def prompts(number: int, prefix: str = "p") -> list[Prompt]:
    return [Prompt(f"{prefix}{i}", f"question {i}", f"answer {i}", {}) for i in range(number)]


class Script:
    """A coordinator, a clock, and what it has sent and nobody has looked at yet."""

    def __init__(
        self, folder: Path, settings: Settings | None = None, num_prompts: int = 8, num_held_out: int = 0, step: int = 0
    ) -> None:
        self.folder = folder
        self.now = 1000.0
        self.ledger = Ledger(folder / "ledger.sqlite")
        train, held_out = prompts(num_prompts), prompts(num_held_out, "h")
        self.coordinator = Coordinator(
            settings or settings_of(), "r1", self.ledger, train, held_out, RunRecord(folder, 0), step
        )
        self.stamp: dict[str, Any] = {"run_id": "r1", "incarnation": self.coordinator.incarnation}
        self.mail: list[tuple[str, m.Message, list[bytes]]] = []

    # -- a turn of the loop -------------------------------------------------------------------------------------------

    def tell(self, peer: str, message: m.Message, buffers: list[bytes] | None = None) -> None:
        self.coordinator.receive(peer, message, buffers or [], self.now)

    def advance(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.coordinator.advance(self.now)
        self.mail += self.coordinator.take_outgoing()

    def take(self, peer: str, kind: type[M]) -> list[M]:
        """Take the messages of one kind to one peer out of the mail."""
        self.advance()
        taken = [message for to, message, _ in self.mail if to == peer and isinstance(message, kind)]
        self.mail = [entry for entry in self.mail if not (entry[0] == peer and isinstance(entry[1], kind))]
        return taken

    # -- a rollout server ---------------------------------------------------------------------------------------------

    def demand(
        self,
        server: str = "s1",
        num_groups: int = 100,
        version: int | None = 0,
        heard_of: int = 0,
        here: dict[str, int] | None = None,
    ) -> list[m.Lease]:
        """Have a server ask for groups; returns the leases it is given. heard_of, here: what it says of others."""
        self.tell(
            server,
            m.Demand(
                **self.stamp, num_groups=num_groups, policy_version=version, heard_of_lease=heard_of, leases=here or {}
            ),
        )
        return self.take(server, m.Lease)

    def finish(self, server: str, lease: m.Lease, version: int = 0, reward: float = 0.5) -> list[str]:
        """Have a server deliver every sample of a lease; returns the outcomes it is told."""
        return [self.deliver(server, lease, index, version, reward).outcome for index in lease.sample_indices]

    def deliver(
        self, peer: str, lease: m.Lease, index: int, version: int = 0, reward: float = 0.5, **changes: Any
    ) -> m.Ack:
        facts: dict[str, Any] = {
            "server": peer,
            "kind": lease.kind,
            "attempt": lease.attempt,
            "is_greedy": index in lease.greedy_indices,
            "incarnation": lease.incarnation,
        }
        trajectory = make_trajectory(lease.group, index, version=version, reward=reward, **(facts | changes))
        return self.send_trajectory(peer, trajectory)

    def send_trajectory(self, server: str, trajectory: Trajectory) -> m.Ack:
        self.tell(server, m.TrajectoryDone(**self.stamp, facts=trajectory.facts), trajectory.to_buffers())
        (ack,) = self.take(server, m.Ack)
        return ack

    def fail(self, server: str, lease: m.Lease, index: int, detail: str = "503") -> m.Ack:
        failed = m.SampleFailed(
            **self.stamp,
            group=lease.group,
            sample_index=index,
            attempt=lease.attempt,
            boundary="reward:em",
            detail=detail,
        )
        self.tell(server, failed)
        (ack,) = self.take(server, m.Ack)
        return ack

    # -- a learner rank -----------------------------------------------------------------------------------------------

    def ask(self, step: int, rank: int = 0) -> list[m.Message]:
        """Have a rank ask for its batch; returns what it is answered at once."""
        self.tell(f"rank-{rank}", m.NextBatch(**self.stamp, step=step, rank=rank))
        return self.take(f"rank-{rank}", m.Message)

    def batch(self, step: int, rank: int = 0) -> m.Batch:
        (answer,) = self.ask(step, rank)
        assert isinstance(answer, m.Batch), answer
        return answer

    def step(self, step: int, version: int, is_applied: bool = True, detail: str = "") -> None:
        stepped = m.Stepped(
            **self.stamp,
            step=step,
            policy_version=version,
            is_applied=is_applied,
            detail=detail,
            metrics={"loss": 0.25},
        )
        self.tell("rank-0", stepped)
        assert len(self.take("rank-0", m.Done)) == 1

    # -- the books ----------------------------------------------------------------------------------------------------

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        self.advance()
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as db:
            return db.execute(query).fetchall()

    def states(self) -> dict[str, int]:
        return dict(self.rows("SELECT state, count(*) FROM prompts GROUP BY state"))

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def resume(self, step: int, **sections: dict[str, Any]) -> "Script":
        """Return the next start of this run, on the same ledger."""
        self.ledger.close()
        return Script(self.folder, settings_of(**sections), step=step)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


# -- the way of a run -------------------------------------------------------------------------------------------------


def test_run_goes_from_leases_to_ended(script: Script) -> None:
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    assert len(script.take("s1", m.Done)) == 1
    for step in (1, 2, 3):
        for lease in script.demand(version=step - 1):
            assert script.finish("s1", lease, version=step - 1) == ["accepted", "accepted"]
        batch = script.batch(step)
        script.step(step, version=step)
        (trained,) = script.take("s1", m.Trained)
        assert sorted(trained.groups) == sorted({facts.group for facts in batch.facts})
    assert script.ask(4) == [m.Ended(**script.stamp, step=4, detail="all steps are done")]
    assert script.states() == {"trained": 6}
    assert script.demand(version=3) == []


def test_window_leases_no_more_than_its_size(script: Script) -> None:
    assert len(script.demand(num_groups=100)) == 4
    assert script.demand("s2", num_groups=100) == []


def test_slots_are_free_again_when_the_step_is_trained_and_not_when_it_is_assigned(script: Script) -> None:
    for lease in script.demand():
        script.finish("s1", lease)
    script.batch(1)
    assert script.demand(version=0) == []
    script.step(1, version=1)
    assert len(script.demand(version=1)) == 2


def test_last_steps_leave_nothing_out(script: Script) -> None:
    """Six groups are wanted in all: with four trained or out, two more go out, not the window's four."""
    for lease in script.demand():
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=1)
    assert len(script.demand(version=1)) == 2
    script.batch(2)
    script.step(2, version=2)
    assert script.demand(version=2) == []


def test_server_that_wants_most_is_served_first(script: Script) -> None:
    script.tell("s1", m.Demand(**script.stamp, num_groups=1, policy_version=0, heard_of_lease=0, leases={}))
    script.tell("s2", m.Demand(**script.stamp, num_groups=3, policy_version=0, heard_of_lease=0, leases={}))
    assert (len(script.take("s2", m.Lease)), len(script.take("s1", m.Lease))) == (3, 1)


@pytest.mark.parametrize("version", [None, 0, 2])
def test_server_without_the_current_weights_is_given_nothing(tmp_path: Path, version: int | None) -> None:
    script = Script(tmp_path, step=1)
    assert script.demand(version=version) == []
    assert len(script.demand(version=1)) == 4


def test_server_one_push_ahead_of_the_books_is_given_leases(script: Script) -> None:
    for lease in script.demand(num_groups=2):
        script.finish("s1", lease)
    script.batch(1)
    assert len(script.demand(version=1)) == 2


def test_lease_carries_its_prompt_and_label(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    number = lease.prompt.split()[1] if isinstance(lease.prompt, str) else ""
    assert (lease.group, lease.label, lease.kind) == (f"e0-p{number}", f"answer {number}", "train")
    assert (lease.sample_indices, lease.greedy_indices, lease.attempt) == ([0, 1], [], 1)


# -- what servers send ------------------------------------------------------------------------------------------------


def test_second_result_is_a_duplicate_and_the_first_one_counts(script: Script) -> None:
    lease = script.demand()[0]
    assert script.deliver("s1", lease, 0, reward=1.0).outcome == "accepted"
    assert script.deliver("s1", lease, 0, reward=0.0).outcome == "duplicate"
    assert script.rows("SELECT reward FROM trajectories") == [(1.0,)]


def test_result_of_a_group_that_is_not_out_is_unknown(script: Script) -> None:
    assert script.send_trajectory("s1", make_trajectory("e9-zz", 0, "s1", 0)).outcome == "unknown"


def test_message_of_another_incarnation_is_answered_and_not_used(script: Script) -> None:
    lease = script.demand()[0]
    trajectory = make_trajectory(lease.group, 0, "s1", 0)
    old = m.TrajectoryDone(run_id="r1", incarnation=0, facts=trajectory.facts)
    script.tell("s1", old, trajectory.to_buffers())
    (refused,) = script.take("s1", m.Refused)
    assert refused.detail == "this is run r1, start 1; you speak of run r1, start 0"
    assert script.take("s1", m.Ack) == []
    assert script.rows("SELECT count(*) FROM trajectories") == [(0,)]
    assert script.coordinator.counts["refused:incarnation"] == 1


def test_frame_that_is_no_message_is_answered_and_counted(script: Script) -> None:
    script.coordinator.refuse("s1", FrameError("$.schema", "is 2", "schema"))
    assert [r.detail for r in script.take("s1", m.Refused)] == ["$.schema: is 2"]
    assert script.coordinator.counts["refused:schema"] == 1


def test_failure_leases_the_missing_sample_alone_again(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    script.deliver("s1", lease, 0)
    assert script.fail("s1", lease, 1).outcome == "returned"
    (again,) = script.demand(num_groups=1)
    assert (again.group, again.attempt, again.sample_indices) == (lease.group, 2, [1])
    assert script.coordinator.counts["failed:reward:em"] == 1
    assert script.finish("s1", again) == ["accepted"]
    assert script.states() == {"ready": 1}


def test_third_failure_skips_the_prompt_with_its_reasons_and_another_takes_its_slot(script: Script) -> None:
    leases = script.demand(num_groups=4)
    first = lease = leases[0]
    script.deliver("s1", lease, 0)
    for number in range(3):
        script.fail("s1", lease, 1, detail=f"50{number}")
        (lease,) = script.demand(num_groups=1)
    assert lease.group not in {known.group for known in leases}
    assert script.rows("SELECT \"group\", reason FROM prompts WHERE state = 'skipped'") == [
        (first.group, "sample 1: reward:em: 500; reward:em: 501; reward:em: 502")
    ]
    assert script.states() == {"leased": 4, "skipped": 1}
    # The finished sibling need not be kept by its server.
    assert [t.groups for t in script.take("s1", m.Trained)] == [[first.group]]


def test_failure_told_by_a_server_that_does_not_hold_the_sample_changes_nothing(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    assert script.fail("s2", lease, 0).outcome == "returned"
    assert script.demand("s2", num_groups=1)[0].group != lease.group


def test_rejected_trajectory_gives_its_sample_back(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    ack = script.deliver("s1", lease, 0, reward=float("nan"))
    assert (ack.outcome, ack.detail) == ("rejected", "$.facts.reward: reward is nan")
    assert script.coordinator.counts["rejected:nonfinite"] == 1
    (again,) = script.demand(num_groups=1)
    assert (again.group, again.sample_indices) == (lease.group, [0])


def test_rejected_trajectories_of_a_sample_that_is_back_do_not_touch_the_step(script: Script) -> None:
    """Three of them once took the group out from under the step that trained on it."""
    leases = script.demand(num_groups=2)
    for lease in leases:
        script.finish("s1", lease)
    script.batch(1)
    for _ in range(3):
        assert script.deliver("s1", leases[0], 0, reward=float("nan")).outcome == "rejected"
    assert script.states() == {"assigned": 2}
    script.step(1, version=1)
    assert script.states() == {"trained": 2}


@pytest.mark.parametrize(
    ("index", "changes", "detail"),
    [
        (0, {"server": "s9"}, "$.facts: server is 's9', leased was 's1'"),
        (0, {"kind": "eval"}, "$.facts: kind is 'eval', leased was 'train'"),
        (0, {"is_greedy": True}, "$.facts: is_greedy is True, leased was False"),
        (7, {}, "$.facts: sample_index is 7, the group has 2 samples"),
    ],
)
def test_trajectory_that_is_not_what_was_leased_is_rejected(
    script: Script, index: int, changes: dict[str, Any], detail: str
) -> None:
    lease = script.demand(num_groups=1)[0]
    ack = script.deliver("s1", lease, index, **changes)
    assert (ack.outcome, ack.detail) == ("rejected", detail)


def test_trajectory_of_weights_that_do_not_exist_is_rejected(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    ack = script.deliver("s1", lease, 0, version=1)
    assert (ack.outcome, ack.detail) == ("rejected", "$.facts.version_spans: has version 1, the learner is at 0")


# -- servers that go silent -------------------------------------------------------------------------------------------


def test_expired_lease_goes_out_again_for_the_missing_sample(script: Script) -> None:
    lease = script.demand(num_groups=1)[0]
    script.deliver("s1", lease, 0)
    script.advance(99.0)
    assert script.demand("s2", num_groups=1)[0].group != lease.group
    script.advance(2.0)
    (again,) = script.demand("s2", num_groups=1)
    assert (again.group, again.attempt, again.sample_indices) == (lease.group, 2, [1])
    assert script.states() == {"leased": 2}


def test_lease_that_expires_three_times_is_a_dead_letter(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    for _ in range(2):
        script.advance(101.0)
        (again,) = script.demand(num_groups=1)
        assert again.group == lease.group
    script.advance(101.0)
    assert script.rows("SELECT \"group\", reason FROM prompts WHERE state = 'skipped'") == [
        (lease.group, "sample 0: " + "; ".join(["lease: s1 did not bring it back within 100 s"] * 3))
    ]


def test_late_result_of_an_expired_lease_is_used_and_the_second_one_is_a_duplicate(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.advance(101.0)
    (again,) = script.demand("s2", num_groups=1)
    assert script.finish("s1", lease) == ["accepted", "accepted"]
    assert script.finish("s2", again) == ["duplicate", "duplicate"]


def test_server_that_says_hello_again_has_lost_its_leases(script: Script) -> None:
    leases = script.demand(num_groups=2)
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=0))
    again = script.demand("s2", num_groups=2)
    assert [lease.group for lease in again] == [lease.group for lease in leases]
    assert {lease.attempt for lease in again} == {2}


def test_server_that_died_is_given_nothing_until_it_asks_again(script: Script) -> None:
    script.demand(num_groups=2)
    script.tell("s1", m.Demand(**script.stamp, num_groups=2, policy_version=0, heard_of_lease=0, leases={}))
    script.coordinator.lose_server("s1", "s1 died")
    assert script.take("s1", m.Lease) == []
    assert script.states() == {"pending": 2}
    assert script.rows("SELECT DISTINCT reason FROM prompts") == [("server: s1 died",)]


def test_ranks_push_again_together_when_the_only_server_is_back_without_weights(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"num_ranks": 2}))
    script.demand()
    script.coordinator.lose_server("s1", "s1 died")
    script.advance(10.0)
    script.ask(1, rank=0)
    assert script.ask(1, rank=1) == []  # there is nobody to push to
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    script.advance()
    script.advance(4.0)
    wait = m.Wait(**script.stamp, detail="step 1 waits for a server with the current weights")
    assert [script.take(f"rank-{rank}", m.Message) for rank in (0, 1)] == [[wait], [wait]]
    assert script.ask(1, rank=0) == []  # the other rank is elsewhere
    again = m.PushAgain(**script.stamp, step=1)
    assert script.ask(1, rank=1) == [again]
    assert script.take("rank-0", m.Message) == [again]


def test_ranks_do_not_push_again_while_a_server_holds_the_weights(script: Script) -> None:
    script.demand("s2", num_groups=1)
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    script.advance()
    script.advance(10.0)
    assert script.ask(1) == []


# -- staleness --------------------------------------------------------------------------------------------------------


def test_waiting_learner_hears_which_servers_it_waits_for(script: Script) -> None:
    script.demand("s1", num_groups=1)
    script.demand("s2", num_groups=1)
    assert script.ask(1) == []
    script.advance(1.5)
    assert script.take("rank-0", m.Wait) == [m.Wait(**script.stamp, detail="step 1 waits for 2 groups on s1, s2")]


def train_without_the_first(script: Script, num_steps: int) -> m.Lease:
    """Train steps of everything but the very first group; returns that group's lease."""
    kept: m.Lease | None = None
    for step in range(1, num_steps + 1):
        for lease in script.demand(version=step - 1):
            if kept is None:
                kept = lease
            else:
                script.finish("s1", lease, version=step - 1)
        script.batch(step)
        script.step(step, version=step)
    assert kept is not None
    return kept


def test_waiting_for_a_slow_group_keeps_the_bound(tmp_path: Path) -> None:
    script = Script(tmp_path)
    slow = train_without_the_first(script, num_steps=1)
    for lease in script.demand(version=1):
        script.finish("s1", lease, version=1)
    assert script.ask(2) == []
    script.finish("s1", slow, version=0)
    assert slow.group in {facts.group for facts in script.take("rank-0", m.Batch)[0].facts}
    script.step(2, version=2)
    assert script.rows("SELECT max(staleness) FROM trajectories") == [(1,)]


def test_dropped_group_is_made_again_on_current_weights_and_trained(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"stale_policy": "drop"}, run={"max_steps": 4}))
    slow = train_without_the_first(script, num_steps=2)
    again = {lease.group: lease for lease in script.demand(version=2)}[slow.group]
    assert (again.attempt, again.sample_indices) == (2, [0, 1])
    assert script.coordinator.counts["dropped:stale"] == 1
    reasons = dict(script.rows('SELECT "group", reason FROM prompts'))
    assert reasons[slow.group] == "too old at policy version 2"
    # What still comes of the first lease is not taken: it would make the group too old once more.
    assert script.finish("s1", slow, version=0) == ["duplicate", "duplicate"]
    assert script.finish("s1", again, version=2) == ["accepted", "accepted"]
    assert dict(script.rows('SELECT "group", state FROM prompts'))[slow.group] == "ready"
    assert script.coordinator.counts["dropped:stale"] == 1


# -- learner ranks ----------------------------------------------------------------------------------------------------


def test_rank_that_asks_twice_gets_the_same_share(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"num_ranks": 2}))
    for lease in script.demand():
        script.finish("s1", lease)
    first = script.batch(1, rank=0)
    other = script.batch(1, rank=1)
    assert script.batch(1, rank=0) == first
    assert sorted(i for share in (first, other) for part in share.micro_batches for i in part) == [0, 1, 2, 3]


def test_stepped_told_twice_counts_once(script: Script) -> None:
    for lease in script.demand():
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=1)
    script.step(1, version=1)
    assert script.states() == {"trained": 2, "ready": 2}
    assert [line["step"] for line in script.metrics()] == [1]


def test_step_that_was_not_applied_skips_its_groups_and_trains_none(script: Script) -> None:
    for lease in script.demand(num_groups=2):
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=0, is_applied=False, detail="loss is nan")
    assert (
        script.rows("SELECT state, step, reason FROM prompts") == [("skipped", 1, "step not applied: loss is nan")] * 2
    )
    assert script.rows("SELECT count(*) FROM trajectories WHERE step IS NOT NULL") == [(0,)]
    assert (script.coordinator.step, script.coordinator.policy_version) == (1, 0)
    assert len(script.demand(version=0)) == 4


def test_rank_outside_the_run_is_refused(script: Script) -> None:
    assert script.ask(1, rank=1) == [
        m.Refused(**script.stamp, detail="$.rank: is 1, this run has 1 ranks", reason="rank")
    ]


def test_rank_that_asks_for_a_step_that_is_done_is_refused(script: Script) -> None:
    for lease in script.demand():
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=1)
    assert script.ask(1) == [m.Refused(**script.stamp, detail="$.step: is 1, step 1 is done", reason="step")]


def test_stop_lets_the_step_under_way_finish_and_ends_every_rank_at_the_same_step(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"num_ranks": 2}))
    for lease in script.demand():
        script.finish("s1", lease)
    script.batch(1, rank=0)
    script.coordinator.stop_after_step("stopped by the user")
    script.batch(1, rank=1)
    assert script.ask(2, rank=1) == []
    script.step(1, version=1)
    ended = m.Ended(**script.stamp, step=2, detail="stopped by the user")
    assert script.take("rank-1", m.Ended) == [ended]
    assert script.ask(2, rank=0) == [ended]
    assert script.demand(version=1) == []


def test_metrics_of_a_step_hold_data_learner_and_coordinator_values(script: Script) -> None:
    for lease in script.demand():
        script.finish("s1", lease, reward=0.25)
    script.batch(1)
    script.step(1, version=1)
    (line,) = script.metrics()
    expected = {"step": 1, "policy_version": 1, "loss": 0.25, "reward_mean": 0.25, "staleness_max": 0}
    assert {name: line[name] for name in expected} == expected
    assert (line["window_used"], line["skipped"], line["retried"]) == (4, 0, 0)


# -- evaluation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluating(tmp_path: Path) -> Script:
    settings = settings_of(eval={"every_steps": 1, "num_prompts": 2, "samples": 2}, data={"eval": "held_out.jsonl"})
    script = Script(tmp_path, settings, num_held_out=3)
    script.tell("rank-0", m.Evaluate(**script.stamp, step=0))
    assert script.take("rank-0", m.Done) == [m.Done(**script.stamp)]
    return script


def poll(script: Script) -> m.Message:
    script.tell("rank-0", m.EvalPoll(**script.stamp, step=0))
    (answer,) = script.take("rank-0", m.Message)
    return answer


def test_evaluation_is_leased_before_training_and_takes_no_slot(evaluating: Script) -> None:
    leases = evaluating.demand()
    assert [lease.kind for lease in leases] == ["eval", "eval", "train", "train", "train", "train"]
    assert [(lease.sample_indices, lease.greedy_indices) for lease in leases[:2]] == [([0, 1, 2], [2])] * 2


def test_evaluation_ends_with_its_means_and_a_line_of_its_own(evaluating: Script) -> None:
    first, second = evaluating.demand(num_groups=2)
    for index, reward in enumerate((1.0, 0.0, 1.0)):
        evaluating.deliver("s1", first, index, reward=reward)
    assert poll(evaluating) == m.Wait(**evaluating.stamp, detail="evaluation: 1 of 2 prompts are back")
    evaluating.finish("s1", second, reward=0.5)
    result = poll(evaluating)
    assert result == m.EvalResult(
        **evaluating.stamp,
        step=0,
        metrics={"eval_policy_version": 0, "eval_failed": 0, "eval_reward": 0.5, "eval_reward_greedy": 0.75},
    )
    (line,) = evaluating.metrics()
    assert (line["step"], line["eval_reward"], line["eval_reward_greedy"]) == (0, 0.5, 0.75)


def test_evaluation_ends_without_a_prompt_that_failed_three_times(evaluating: Script) -> None:
    lease, other = evaluating.demand(num_groups=2)
    for _ in range(2):
        evaluating.fail("s1", lease, 0)
        (lease,) = evaluating.demand(num_groups=1)
        assert lease.kind == "eval"
    evaluating.fail("s1", lease, 0)
    evaluating.finish("s1", other, reward=1.0)
    result = poll(evaluating)
    assert isinstance(result, m.EvalResult)
    assert result.metrics == {
        "eval_policy_version": 0,
        "eval_failed": 1,
        "eval_reward": 1.0,
        "eval_reward_greedy": 1.0,
    }


def test_learner_that_waits_for_an_evaluation_pushes_again_when_the_only_server_is_back(evaluating: Script) -> None:
    evaluating.tell("s1", m.Hello(**evaluating.stamp, server="s1", policy_version=None))
    evaluating.advance()
    evaluating.advance(2.0)
    assert poll(evaluating) == m.Wait(**evaluating.stamp, detail="evaluation: 0 of 2 prompts are back")
    evaluating.advance(2.0)
    assert poll(evaluating) == m.PushAgain(**evaluating.stamp, step=0)
    assert isinstance(poll(evaluating), m.Wait)  # that push is given its time


def test_evaluation_lease_of_a_silent_server_goes_out_again(evaluating: Script) -> None:
    leases = evaluating.demand("s1", num_groups=2)
    evaluating.advance(101.0)
    assert [lease.group for lease in evaluating.demand("s2", num_groups=2)] == [lease.group for lease in leases]


def test_evaluation_group_that_came_back_late_is_not_leased_again(evaluating: Script) -> None:
    lease, _ = evaluating.demand("s1", num_groups=2)
    evaluating.advance(101.0)
    evaluating.finish("s1", lease)
    assert lease.group not in {again.group for again in evaluating.demand("s2")}


# -- what is lost on the way ------------------------------------------------------------------------------------------


def test_lease_that_a_server_heard_of_and_does_not_have_goes_out_again(script: Script) -> None:
    lost, kept = script.demand(num_groups=2)
    (again,) = script.demand(num_groups=1, heard_of=2, here={kept.group: 1})
    assert (again.group, again.attempt, again.number) == (lost.group, 2, 3)
    assert script.coordinator.counts["lost_leases"] == 1
    assert script.rows("SELECT * FROM failures") == []


def test_lease_that_a_server_has_not_heard_of_yet_stays_with_it(script: Script) -> None:
    script.demand(num_groups=2)
    assert {lease.number for lease in script.demand(num_groups=9, heard_of=0)} == {3, 4}


def test_second_lease_that_was_lost_is_not_taken_for_the_first(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.fail("s1", lease, 0)
    (second,) = script.demand(num_groups=1)
    (third,) = script.demand(num_groups=1, heard_of=2, here={lease.group: 1})
    assert [second.attempt, third.attempt, third.sample_indices] == [2, 3, [0, 1]]


def test_lease_that_could_not_be_sent_goes_to_another_server(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    script.coordinator.note_undeliverable("s1", lease, script.now)
    (again,) = script.demand("s2", num_groups=1)
    assert again.group == lease.group
    assert script.coordinator.counts["undeliverable"] == 1


def test_server_without_a_connection_for_four_seconds_has_lost_its_leases(script: Script) -> None:
    (lease,) = script.demand(num_groups=1)
    (ping,) = script.take("s1", m.Ping)
    assert ping.newest_lease == 1
    for seconds in (0.0, 1.0, 2.0, 3.0):
        script.coordinator.note_undeliverable("s1", ping, script.now + seconds)
        assert script.demand("s2", num_groups=0) == []
    script.coordinator.note_undeliverable("s1", ping, script.now + 4.0)
    (again,) = script.demand("s2", num_groups=1)
    assert again.group == lease.group
    assert script.rows("SELECT sample_index, server, boundary FROM failures") == [
        (0, "s1", "server"),
        (1, "s1", "server"),
    ]


def test_server_that_is_silent_for_minutes_keeps_its_leases_while_it_has_a_connection(script: Script) -> None:
    script.demand(num_groups=1)
    script.advance(90.0)
    assert script.states() == {"leased": 1}


def test_overdue_lease_goes_to_another_server_as_well_and_the_first_result_counts(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(run={"max_steps": 100}, rollout={"lease_timeout_s": 1000}), num_prompts=200)
    for step in range(1, 21):  # forty groups that take ten seconds each
        leases = script.demand(num_groups=2, version=step - 1)
        script.advance(10.0)
        for lease in leases:
            script.finish("s1", lease, version=step - 1)
        script.batch(step)
        script.step(step, version=step)
    (late,) = script.demand(num_groups=1, version=20)
    script.advance(39.0)
    assert script.demand("s2", num_groups=1, version=20)[0].group != late.group
    script.tell("s1", m.Demand(**script.stamp, num_groups=5, policy_version=20, heard_of_lease=0, leases={}))
    script.advance(2.0)
    assert script.coordinator.counts["leased_twice"] == 0  # not to the server that is late
    (again,) = script.demand("s2", num_groups=1, version=20)
    assert (again.group, again.attempt, again.sample_indices) == (late.group, 2, [0, 1])
    assert script.finish("s1", late, version=20) == ["accepted", "accepted"]
    assert script.finish("s2", again, version=20) == ["duplicate", "duplicate"]


# -- resume -----------------------------------------------------------------------------------------------------------


def test_resumed_run_leases_unfinished_prompts_first_and_none_that_was_trained(tmp_path: Path) -> None:
    script = Script(tmp_path)
    leases = script.demand()
    for lease in leases[:3]:
        script.finish("s1", lease)
    trained = {facts.group for facts in script.batch(1).facts}
    script.step(1, version=1)
    later = script.demand(version=1)
    out = [lease.group for lease in (*leases, *later) if lease.group not in trained]
    resumed = script.resume(step=1)
    again = resumed.demand(version=1)
    assert resumed.coordinator.incarnation == 2
    assert [lease.group for lease in again] == out
    assert [lease.attempt for lease in again] == [2] * len(out)
    for lease in again:
        assert resumed.finish("s1", lease, version=1) == ["accepted", "accepted"]
    for step in (2, 3):
        resumed.batch(step)
        resumed.step(step, version=step)
    assert resumed.states() == {"trained": 6}


def test_resumed_group_is_not_too_old_at_a_late_step(tmp_path: Path) -> None:
    """It once kept version 0 and was dropped and leased again at every turn."""
    script = Script(tmp_path, settings_of(run={"max_steps": 20}))
    script.demand()
    resumed = script.resume(step=10, run={"max_steps": 20})
    leases = resumed.demand(version=10)
    resumed.advance()
    assert len(leases) == 4
    assert resumed.demand(version=10) == []
    assert resumed.coordinator.counts["dropped:stale"] == 0


def test_resumed_run_knows_that_a_step_was_not_applied(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for lease in script.demand(num_groups=2):
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=0, is_applied=False, detail="loss is nan")
    resumed = script.resume(step=1)
    assert (resumed.coordinator.step, resumed.coordinator.policy_version) == (1, 0)
    assert len(resumed.demand(version=0)) == 4


def test_result_that_its_server_kept_is_used_by_the_next_start(tmp_path: Path) -> None:
    script = Script(tmp_path)
    (lease,) = script.demand(num_groups=1)
    script.deliver("s1", lease, 0)
    resumed = script.resume(step=0)
    assert resumed.deliver("s1", lease, 0).outcome == "accepted"
    (again, *_) = resumed.demand("s2")
    assert (again.group, again.sample_indices) == (lease.group, [1])


def test_result_of_weights_that_the_checkpoint_did_not_have_is_not_used(tmp_path: Path) -> None:
    script = Script(tmp_path)
    leases = script.demand()
    for lease in leases[:2]:
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=1)
    resumed = script.resume(step=1)
    assert resumed.deliver("s1", leases[2], 0, version=2).outcome == "unknown"
    assert resumed.deliver("s1", leases[2], 0, version=1).outcome == "accepted"
    assert resumed.coordinator.counts["unused:lineage"] == 1
    assert resumed.rows("SELECT reason, num_tokens FROM waste") == [("lineage", 2)]


def test_failures_of_an_earlier_start_count_towards_a_dead_letter(tmp_path: Path) -> None:
    script = Script(tmp_path)
    (lease,) = script.demand(num_groups=1)
    script.fail("s1", lease, 0)
    (again,) = script.demand(num_groups=1)
    script.fail("s1", again, 0)
    resumed = script.resume(step=0)
    (last, *_) = resumed.demand()
    assert last.group == lease.group
    resumed.fail("s1", last, 0)
    assert resumed.rows("SELECT \"group\" FROM prompts WHERE state = 'skipped'") == [(lease.group,)]


def test_resumed_run_skips_a_prompt_that_the_data_set_no_longer_holds(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.demand(num_groups=4)
    script.ledger.close()
    resumed = Script(tmp_path, num_prompts=1)
    resumed.demand()
    reasons = resumed.rows("SELECT DISTINCT reason FROM prompts WHERE state = 'skipped'")
    assert reasons == [("the data set no longer holds this prompt",)]


def test_save_ledger_writes_a_copy_that_a_run_can_resume_from(script: Script, tmp_path: Path) -> None:
    for lease in script.demand():
        script.finish("s1", lease)
    script.batch(1)
    script.step(1, version=1)
    copy = tmp_path / "copy.sqlite"
    script.tell("rank-0", m.SaveLedger(**script.stamp, path=str(copy), step=1))
    assert len(script.take("rank-0", m.Done)) == 1
    with closing(Ledger(copy)) as ledger:
        assert ledger.meta("position") == "4"
        assert len(ledger.recall_unfinished()) == 2


@pytest.mark.parametrize(
    "path",
    ["/elsewhere.sqlite", "{}/../elsewhere.sqlite", "{}/ledger.sqlite", "{}/no/folder", "{}", "{}/\0", "x" * 4096],
)
def test_save_ledger_is_refused_outside_the_run_s_folder(script: Script, tmp_path: Path, path: str) -> None:
    path = path.replace("{}", str(tmp_path))
    script.tell("rank-0", m.SaveLedger(**script.stamp, path=path, step=1))
    (refused,) = script.take("rank-0", m.Refused)
    assert refused.detail == f"$.path: {path[:500]} is no new file inside {tmp_path}"
    assert script.coordinator.counts["refused:path"] == 1
    assert not (tmp_path.parent / "elsewhere.sqlite").exists()


# -- whole runs in random orders --------------------------------------------------------------------------------------


class Simulation:
    """Servers and ranks that do anything they may, in random order, until the run ends."""

    def __init__(self, script: Script, seed: int, num_ranks: int) -> None:
        self.script, self.random, self.num_ranks = script, Random(seed), num_ranks
        self.version = script.coordinator.policy_version
        self.step = script.coordinator.step
        self.held: list[tuple[str, m.Lease, int]] = []
        self.ended: dict[int, int] = {}

    def serve(self) -> None:
        server = f"s{self.random.randint(1, 3)}"
        for lease in self.script.demand(server, self.random.randint(0, 3), self.version):
            self.held += [(server, lease, index) for index in lease.sample_indices]

    def finish(self) -> None:
        if self.held:
            server, lease, index = self.held.pop(self.random.randrange(len(self.held)))
            what = self.random.random()
            if what < 0.05:
                self.script.fail(server, lease, index)
            elif what < 0.1:
                self.script.deliver(server, lease, index, self.version, reward=float("nan"))
            else:
                oldest = max(0, self.version - self.random.randint(0, 1))
                self.script.deliver(server, lease, index, oldest, reward=self.random.random())

    def lose(self) -> None:
        if self.random.random() < 0.1:
            server = f"s{self.random.randint(1, 3)}"
            self.held = [entry for entry in self.held if entry[0] != server]
            self.script.tell(server, m.Hello(**self.script.stamp, server=server, policy_version=self.version))

    def learn(self) -> None:
        answers = [self.script.ask(self.step + 1, rank) for rank in range(self.num_ranks)]
        if all(answer and isinstance(answer[0], m.Batch) for answer in answers):
            self.step += 1
            is_applied = self.random.random() > 0.05
            self.version += is_applied
            self.script.step(self.step, self.version, is_applied)
        for rank, answer in enumerate(answers):
            if answer and isinstance(answer[0], m.Ended):
                self.ended[rank] = answer[0].step

    def run(self, max_turns: int = 5000) -> None:
        actions = [self.serve, self.finish, self.finish, self.finish, self.learn, self.lose]
        for _ in range(max_turns):
            if len(self.ended) == self.num_ranks:
                return
            self.random.choice(actions)()
        raise AssertionError(f"the run stands still: {self.script.coordinator.status()}")


@pytest.mark.parametrize("policy", ["wait", "drop"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@hypothesis_settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(seed=st.integers(0, 2**32))
def test_random_run_accounts_for_every_prompt_and_keeps_its_bounds(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int, policy: str, seed: int
) -> None:
    settings = settings_of(
        run={"max_steps": 8},
        learner={"num_ranks": 2, "max_staleness": max_staleness, "stale_policy": policy},
    )
    script = Script(tmp_path_factory.mktemp("run"), settings, num_prompts=6)
    simulation = Simulation(script, seed, num_ranks=2)
    simulation.run()
    assert simulation.ended == {0: 9, 1: 9}
    states = script.states()
    assert set(states) <= {"trained", "skipped"}
    num_in_steps = script.rows("SELECT count(*) FROM prompts WHERE step IS NOT NULL")[0][0]
    assert num_in_steps == 8 * 2
    staleness = [row[0] for row in script.rows("SELECT staleness FROM trajectories WHERE staleness IS NOT NULL")]
    assert all(0 <= value <= max_staleness for value in staleness)
    assert script.rows("SELECT count(*) FROM prompts WHERE state = 'skipped' AND reason IS NULL") == [(0,)]
    per_group = script.rows('SELECT "group", count(*) FROM trajectories WHERE step IS NOT NULL GROUP BY "group"')
    assert {count for _, count in per_group} == {2}
    script.ledger.close()


def test_every_prompt_is_trained_once_in_every_epoch(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(run={"max_steps": 9}), num_prompts=6)
    for step in range(1, 10):
        for lease in script.demand(version=step - 1):
            script.finish("s1", lease, version=step - 1)
        script.batch(step)
        script.step(step, version=step)
    trained = script.rows("SELECT epoch, uid FROM prompts WHERE state = 'trained'")
    assert Counter(trained) == {(epoch, f"p{i}"): 1 for epoch in range(3) for i in range(6)}
    assert script.states() == {"trained": 18}


def test_run_killed_at_random_and_resumed_trains_no_prompt_of_an_epoch_twice(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {"run": {"max_steps": 12}}
    script = Script(tmp_path, settings_of(**settings), num_prompts=8)
    for start in range(4):
        simulation = Simulation(script, seed=start, num_ranks=1)
        for _ in range(60):
            simulation.random.choice([simulation.serve, simulation.finish, simulation.finish, simulation.learn])()
        script.ledger.close()
        script = Script(tmp_path, settings_of(**settings), num_prompts=8, step=simulation.step)
        assert script.coordinator.policy_version == simulation.version
    Simulation(script, seed=99, num_ranks=1).run()
    assert script.rows("SELECT count(*) FROM prompts WHERE step IS NOT NULL") == [(24,)]
    assert set(script.states()) <= {"trained", "skipped"}
