"""Copies of the ledger that are made while it goes on: of one moment, one file, made once, answered when whole."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from learner.ledger.snapshots import LedgerCopies, run_in_thread
from learner.rank.coordinator_client import CoordinatorClient, Patience
from protocol.errors import FrameError, OperatorError
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from protocol.wire.channel import DealerChannel
from tests.fakes.running_coordinator import RUN_ID, running_coordinator

Work = Callable[[], None]


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.lease("early", 0, "uid-early", 0, "s1", 1)
        yield ledger


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the copy goes: alone in its folder."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    return folder / "ledger.sqlite"


def groups_in(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return [group for (group,) in db.execute('SELECT "group" FROM prompts ORDER BY position')]


# -- one copy ---------------------------------------------------------------------------------------------------------


def test_copy_holds_what_was_there_when_it_was_begun(ledger: Ledger, target: Path) -> None:
    copy = ledger.begin_copy(target)
    for position in range(1, 2000):
        ledger.lease(f"g{position}", 0, f"uid-{position}", position, "s1", 1)
        ledger.commit()
    assert copy.make()
    assert groups_in(target) == ["early"]


def test_ledger_s_log_is_used_from_its_beginning_again_after_a_copy(ledger: Ledger, target: Path) -> None:
    copy = ledger.begin_copy(target)
    log = target.parents[1] / "ledger.sqlite-wal"

    def account(epoch: int) -> int:
        for position in range(1500):
            ledger.lease(f"e{epoch}-{position}", epoch, f"uid-{position}", position, "s1", 1)
            ledger.commit()
        return log.stat().st_size

    grown = account(1)
    assert grown > 8 << 20  # held by the copy: it is checkpointed at 4 MiB otherwise
    copy.make()
    assert account(2) - grown < 1 << 20


def test_copy_that_was_given_up_leaves_no_file(ledger: Ledger, target: Path) -> None:
    copy = ledger.begin_copy(target)
    copy.cancel()
    assert not copy.make()
    assert list(target.parent.iterdir()) == []


# -- requests ---------------------------------------------------------------------------------------------------------


def test_request_repeated_during_its_copy_starts_no_second_copy_and_is_confirmed_once(
    ledger: Ledger, target: Path
) -> None:
    work: list[Work] = []
    copies = LedgerCopies(ledger.begin_copy, work.append)
    for _ in range(3):
        copies.request_copy("rank-0", target, 7)
    assert len(work) == 1
    assert copies.take_finished() == []
    work[0]()
    assert copies.take_finished() == [("rank-0", 7)]
    assert copies.take_finished() == []


def test_request_repeated_after_its_copy_changes_nothing_and_a_new_request_writes_the_file_again(
    ledger: Ledger, target: Path
) -> None:
    copies = LedgerCopies(ledger.begin_copy)
    copies.request_copy("rank-0", target, 7)
    copies.request_copy("rank-0", target, 7)
    assert copies.take_finished() == [("rank-0", 7)]
    before = (target.read_bytes(), target.stat())
    ledger.lease("late", 0, "uid-late", 1, "s1", 1)
    copies.request_copy("rank-0", target, 7)
    assert copies.take_finished() == [("rank-0", 7)]
    assert (target.read_bytes(), target.stat()) == before
    copies.request_copy("rank-0", target, 8)
    assert copies.take_finished() == [("rank-0", 8)]
    assert groups_in(target) == ["early", "late"]


def test_second_request_is_refused_while_a_copy_is_being_written(ledger: Ledger, target: Path) -> None:
    work: list[Work] = []
    copies = LedgerCopies(ledger.begin_copy, work.append)
    copies.request_copy("rank-0", target, 7)
    with pytest.raises(FrameError) as caught:
        copies.request_copy("rank-0", target, 8)
    assert str(caught.value) == f"$.path: is requested while the copy {target} is being written"
    work[0]()
    assert copies.take_finished() == [("rank-0", 7)]


def test_error_of_a_copy_in_a_thread_is_raised_by_take_finished(ledger: Ledger, target: Path) -> None:
    copies = LedgerCopies(ledger.begin_copy, threads := Threads())
    target.parent.rmdir()
    copies.request_copy("rank-0", target, 7)
    threads.join()
    with pytest.raises(OperatorError) as caught:
        copies.take_finished()
    assert str(caught.value) == (
        f"The ledger's copy {target} cannot be written: unable to open database file. Check the disk."
    )


def test_running_copy_is_cancelled_by_close(ledger: Ledger, target: Path) -> None:
    delayed: list[threading.Timer] = []

    def start_late(work: Work) -> None:
        delayed.append(threading.Timer(0.5, work))
        delayed[0].start()

    copies = LedgerCopies(ledger.begin_copy, start_late)
    copies.request_copy("rank-0", target, 7)
    copies.close()
    delayed[0].join()
    assert list(target.parent.iterdir()) == []


class Threads:
    """Starts work as a run does, and waits for it."""

    def __call__(self, work: Work) -> None:
        self._has_ended = threading.Event()

        def note() -> None:
            work()
            self._has_ended.set()

        run_in_thread(note)

    def join(self) -> None:
        assert self._has_ended.wait(60.0)


# -- the coordinator --------------------------------------------------------------------------------------------------


def test_coordinator_keeps_working_during_a_copy_and_confirms_it_when_complete(tmp_path: Path) -> None:
    work: list[Work] = []
    ledger = Ledger(tmp_path / "ledger.sqlite")
    (tmp_path / "checkpoint").mkdir()
    target = tmp_path / "checkpoint" / "ledger.sqlite"
    settings = Settings.model_validate({"rollout": {"group_size": 2}, "learner": {"groups_per_step": 2}})
    prompts = [Prompt(f"p{i}", f"question {i}", f"answer {i}", {}) for i in range(4)]
    record, copies = RunRecord(tmp_path, 0), LedgerCopies(ledger.begin_copy, work.append)
    coordinator = Coordinator(settings, "r1", ledger, prompts, [], record, last_step=0, copies=copies)
    stamp: dict[str, Any] = {"run_id": "r1", "incarnation": 1}

    def answers(message: m.Message, peer: str, now: float) -> list[m.Message]:
        coordinator.receive(peer, message, [], now)
        coordinator.advance(now)
        return [
            answer for to, answer, _ in coordinator.take_outgoing() if to == peer and not isinstance(answer, m.Ping)
        ]

    save = m.SaveLedger(**stamp, request=5, path=str(target), step=1)
    assert answers(save, "rank-0", 1.0) == []
    demand = m.Demand(**stamp, num_groups=1, policy_version=0, heard_of_lease=0, leases={})
    assert [type(answer) for answer in answers(demand, "s1", 2.0)] == [m.Lease]
    waiting = m.Wait(**stamp, request=5, detail=f"the ledger is being copied to {target}")
    assert answers(save, "rank-0", 3.0) == [waiting]
    (make,) = work
    make()
    done = m.Done(**stamp, request=5)
    coordinator.advance(4.0)
    assert ("rank-0", done, []) in coordinator.take_outgoing()
    assert groups_in(target) == []
    target.parent.rename(tmp_path / "step_000001")
    assert answers(save, "rank-0", 5.0) == [done]
    ledger.close()


def test_request_of_a_rank_is_confirmed_over_a_socket_after_a_thread_made_the_copy(
    tmp_path: Path, target: Path
) -> None:
    with running_coordinator(tmp_path, {}) as run:
        place = run.place
        channel = DealerChannel(place.address, "rank-0", place.peer_keys, place.coordinator_key)
        client = CoordinatorClient(channel, RUN_ID, 1)
        for step in (1, 2):
            client.save_ledger(target, step)
            assert [file.name for file in target.parent.iterdir()] == ["ledger.sqlite"]
            with closing(sqlite3.connect(target)) as db:
                assert db.execute("SELECT number FROM incarnations").fetchall() == [(1,)]
            target.unlink()
        channel.close()


def test_rank_waits_for_a_copy_that_takes_long(tmp_path: Path, target: Path) -> None:
    release = threading.Event()

    def start_late(work: Work) -> None:
        run_in_thread(lambda: (release.wait(60.0), work())[1])

    with running_coordinator(tmp_path, {}, start_copy=start_late) as run:
        place = run.place
        channel = DealerChannel(place.address, "rank-0", place.peer_keys, place.coordinator_key)
        client = CoordinatorClient(channel, RUN_ID, 1, Patience(retry_s=0.05))
        told: list[str] = []

        def tell(what: str) -> None:
            told.append(what)
            release.set()

        client.save_ledger(target, 1, tell)
        assert told[-1].endswith(f"for the coordinator: the ledger is being copied to {target}")
        with closing(sqlite3.connect(target)) as db:
            assert db.execute("SELECT number FROM incarnations").fetchall() == [(1,)]
        channel.close()


@pytest.mark.parametrize("path", ["lock", "checkpoints/tmp-step_000001"])
def test_copy_that_would_first_be_written_over_what_the_run_needs_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "checkpoints" / ".tmp-step_000001").mkdir(parents=True)
    (tmp_path / ".lock").touch()
    prompts = [Prompt("p0", "question 0", "answer 0", {})]
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        coordinator = Coordinator(Settings(), "r1", ledger, prompts, [], RunRecord(tmp_path, 0), last_step=0)
        save = m.SaveLedger(run_id="r1", incarnation=1, request=5, path=str(tmp_path / path), step=1)
        coordinator.receive("rank-0", save, [], 1.0)
        ((_, refused, _),) = coordinator.take_outgoing()
    assert isinstance(refused, m.Refusal)
    assert refused.detail == f"$.path: {tmp_path / path} is not a new file inside {tmp_path}"
    assert (tmp_path / ".lock").exists()
