"""Waiting for rank 0's own work: as long as it makes progress, and no longer."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from learner.checkpoint.sealed_files import Report
from learner.rank.solo_work import SoloWork
from protocol.errors import NeighbourError

LIMIT_S = 1.0


class DictStore:
    """A store in this process. `is_gone`: the process that served it has ended."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)


def test_others_wait_longer_than_the_limit_while_rank_0_makes_progress() -> None:
    limit_s = 2.0
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)  # type: ignore[attr-defined]

    def slow(report: Report) -> None:
        for number in range(26):
            report(f"part {number}")
            time.sleep(0.1)

    with ThreadPoolExecutor(1) as pool:
        started = time.monotonic()
        waiting = pool.submit(SoloWork(store, 1, limit_s).do, "save step 3", slow)
        SoloWork(store, 0, limit_s).do("save step 3", slow)
        worked_s = time.monotonic() - started
        waiting.result(timeout=20.0)

    assert worked_s > limit_s


def test_rank_0_without_progress_is_named_with_its_last_phase() -> None:
    store, stop = DictStore(), threading.Event()

    def stuck(report: Report) -> None:
        report("hashing: 256 MiB")
        stop.wait(60.0)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(SoloWork(store, 0, LIMIT_S).do, "save step 3", stuck)
        started = time.monotonic()
        with pytest.raises(NeighbourError) as raised:
            SoloWork(store, 1, LIMIT_S).do("save step 3", stuck)
        waited_s = time.monotonic() - started
        stop.set()
        working.result(timeout=20.0)

    assert str(raised.value) == (
        "learner rank 0: made no progress for 1 s (learner.rank_timeout_s) while rank 1 waited for it to save step 3; "
        "last: hashing: 256 MiB"
    )
    assert waited_s >= LIMIT_S


def test_rank_0_that_never_begins_is_named() -> None:
    with pytest.raises(NeighbourError, match=r"waited for it to save step 3; last: nothing yet$"):
        SoloWork(DictStore(), 1, 0.2).do("save step 3", lambda tell: None)


def test_rank_0_that_is_gone_is_named_at_once() -> None:
    store = DictStore()
    store.is_gone = True
    with pytest.raises(NeighbourError, match=r"^learner rank 0: is gone: rank 2 waited for it to save step 3"):
        SoloWork(store, 2, 60.0).do("save step 3", lambda tell: None)


def test_the_first_work_does_not_end_the_wait_for_the_second() -> None:
    store = DictStore()
    first, other = SoloWork(store, 0, 0.2), SoloWork(store, 1, 0.2)
    first.do("one", lambda tell: None)
    other.do("one", lambda tell: None)
    with pytest.raises(NeighbourError, match="waited for it to two"):
        other.do("two", lambda tell: None)


def test_an_error_of_the_work_is_raised_on_rank_0_only() -> None:
    store = DictStore()

    def fail(report: Report) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        SoloWork(store, 0, 0.2).do("one", fail)
    assert "solo-work/0/done" not in store.values


def test_rank_0_that_hangs_is_named_although_its_store_never_answers() -> None:
    class StoppedStore(DictStore):
        def check(self, keys: list[str]) -> bool:
            threading.Event().wait()
            return False

    started = time.monotonic()
    with pytest.raises(NeighbourError) as caught:
        SoloWork(StoppedStore(), 1, 0.2).do("save step 3", lambda tell: None)
    assert time.monotonic() - started < 30.0
    assert str(caught.value) == (
        "learner rank 0: made no progress for 0.2 s (learner.rank_timeout_s) "
        "while rank 1 waited for it to save step 3; last: nothing yet"
    )
