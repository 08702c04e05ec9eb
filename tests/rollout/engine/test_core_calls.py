"""What the engine's process does at a push's commit, on a core that notes what it was told."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.core_calls import COMMIT, HAS_RECEIVED, add_calls

CONFIRM = ("update_weights", {"update_info": {"expected_digest": "d5"}})
LOAD = ("finish_weight_update", None)


def worker_whose_receiving_has(ended: bool) -> Any:
    receiving: Future[list[Any]] = Future()
    if ended:
        receiving.set_result([])
    return SimpleNamespace(weight_transfer_engine=SimpleNamespace(receiving=lambda: receiving))


class Core:
    """is_busy: it has a step to end before it stands still. refuses: the call of a worker that fails."""

    def __init__(self, is_busy: bool, refuses: str = "") -> None:
        self.told: list[Any] = []
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.paused: Future[None] | None = Future() if is_busy else None
        self.workers = [worker_whose_receiving_has(ended=True)]
        self._refuses = refuses
        self.model_executor = SimpleNamespace(is_sleeping=False)

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self.told.append((mode, clear_cache))
        return self.paused

    def collective_rpc(self, method: str | Callable[[Any], Any], kwargs: Any = None) -> list[Any]:
        if callable(method):
            return [method(worker) for worker in self.workers]
        self.told.append((method, kwargs))
        if method == self._refuses:
            raise ValueError("refused")
        return [None]

    def set_weight_version(self, version: str) -> None:
        self.told.append(version)

    def resume_scheduler(self) -> None:
        self.told.append("resume")


class CalledCore(Core):
    """A core that has Sluice's calls."""


add_calls(CalledCore, "wake up")


def test_commit_of_a_core_that_stands_still_loads_at_once_and_goes_on() -> None:
    core = CalledCore(is_busy=False)
    pause_s = getattr(core, COMMIT)("5", "d5")

    assert core.told == [("keep", False), CONFIRM, LOAD, "5", "resume"]
    assert 0.0 <= pause_s < 60.0
    assert core.input_queue.get_nowait() == ("wake up", None)  # or it would wait for a message before it looks for work


def test_commit_of_a_core_that_sleeps_goes_on_when_it_is_woken() -> None:
    core = CalledCore(is_busy=False)
    core.model_executor.is_sleeping = True
    getattr(core, COMMIT)("5", "d5")

    assert core.told == [("keep", False), CONFIRM, LOAD, "5"]


def test_commit_waits_for_the_step_under_way() -> None:
    core = CalledCore(is_busy=True)
    loaded = getattr(core, COMMIT)("5", "d5")
    told_before = list(core.told)
    assert core.paused is not None
    core.paused.set_result(None)

    assert told_before == [("keep", False)]
    assert core.told == [("keep", False), CONFIRM, LOAD, "5", "resume"]
    assert loaded.result(0.0) >= 0.0
    assert core.input_queue.get_nowait() == ("wake up", None)


@pytest.mark.parametrize("refuses", ["update_weights", "finish_weight_update"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_core_stands_still_without_a_version_after_a_refusal(is_busy: bool, refuses: str) -> None:
    core = CalledCore(is_busy, refuses)

    def commit() -> None:
        loaded = getattr(core, COMMIT)("5", "d5")
        assert core.paused is not None
        core.paused.set_result(None)
        loaded.result(0.0)

    with pytest.raises(ValueError, match="refused"):
        commit()
    assert "5" not in core.told
    assert "resume" not in core.told
    assert (LOAD in core.told) == (refuses == "finish_weight_update")


def test_push_has_come_when_every_worker_has_it() -> None:
    core = CalledCore(is_busy=False)
    core.workers.append(worker_whose_receiving_has(ended=True))
    answers = [getattr(core, HAS_RECEIVED)()]
    core.workers.append(worker_whose_receiving_has(ended=False))
    answers.append(getattr(core, HAS_RECEIVED)())

    assert answers == [True, False]


def test_error_that_stopped_a_workers_push_is_raised() -> None:
    core = CalledCore(is_busy=False)
    core.workers = [worker_whose_receiving_has(ended=False)]
    core.workers[0].weight_transfer_engine.receiving().set_exception(ConnectionError("lost a peer"))

    with pytest.raises(ConnectionError, match="lost a peer"):
        getattr(core, HAS_RECEIVED)()
