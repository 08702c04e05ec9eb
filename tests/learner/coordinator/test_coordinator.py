"""The coordinator as a state machine: a whole run, messages that are not for it, and copies of its ledger."""

from contextlib import closing
from pathlib import Path

import pytest

from learner.ledger.ledger import Ledger
from protocol.errors import FrameError
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script
from tests.protocol.wire.examples import make_trajectory


def test_run_goes_from_leases_to_ended(script: Script) -> None:
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    assert len(script.take("s1", m.Done)) == 1
    for step in (1, 2, 3):
        for lease in script.demand(version=step - 1):
            assert script.finish("s1", lease, version=step - 1) == ["accepted", "accepted"]
        batch = script.batch(step)
        script.step(step, version=step)
        (trained,) = script.take("s1", m.GroupsTrained)
        assert sorted(trained.groups) == sorted({facts.group for facts in batch.facts})
    assert script.ask(4) == [m.RunEnd(**script.stamp, step=4, detail="all steps are done")]
    assert script.states() == {"trained": 6}
    assert script.demand(version=3) == []


def test_run_says_at_its_end_how_many_steps_were_not_applied(script: Script) -> None:
    script.train(1)
    for step in (2, 3):
        script.demand_and_finish(version=1, num_groups=2)
        script.batch(step)
        script.step(step, version=1, is_applied=False, detail="loss is nan")
    detail = "all steps are done, but 2 of 3 since the start were not applied"
    assert script.ask(4) == [m.RunEnd(**script.stamp, step=4, detail=detail)]


def test_message_of_another_incarnation_is_answered_and_not_used(script: Script) -> None:
    lease = script.demand()[0]
    trajectory = make_trajectory(lease.group, 0, "s1", 0)
    old = m.TrajectoryDone(run_id="r1", incarnation=0, facts=trajectory.facts)
    script.tell("s1", old, trajectory.to_buffers())
    (refused,) = script.take("s1", m.Refusal)
    assert refused.detail == "this is run r1, start 1; your message is of run r1, start 0"
    assert script.take("s1", m.Ack) == []
    assert script.rows("SELECT count(*) FROM trajectories") == [(0,)]
    assert script.coordinator.counts["refused:incarnation"] == 1


def test_frame_that_is_no_message_is_answered_and_counted(script: Script) -> None:
    script.coordinator.refuse("s1", FrameError("$.schema", "is 2", "schema"))
    assert [r.detail for r in script.take("s1", m.Refusal)] == ["$.schema: is 2"]
    assert script.coordinator.counts["refused:schema"] == 1


def test_save_ledger_writes_a_copy_that_a_run_can_resume_from(script: Script, tmp_path: Path) -> None:
    script.train(1)
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
    (refused,) = script.take("rank-0", m.Refusal)
    assert refused.detail == f"$.path: {path[:500]} is not a new file inside {tmp_path}"
    assert script.coordinator.counts["refused:path"] == 1
    assert not (tmp_path.parent / "elsewhere.sqlite").exists()
