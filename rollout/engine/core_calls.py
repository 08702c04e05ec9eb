"""What Sluice adds to vLLM's engine process: two calls, so that a push costs generation one message's time and no more.

vLLM's client calls an engine by the names of `EngineCore`'s methods, between two steps. `add_calls` gives that class
these: as calls of the client's own, the pause, the digest, the loading, the version and the resumption would be
messages to and fro, each behind whatever else the server does, while nothing is generated.
And one by which an engine that slept has its memory back and stands still: vLLM's own has it go on in any case.
"""

import os
import time
from concurrent.futures import Future
from typing import Any

HAS_RECEIVED = "sluice_has_received"
COMMIT = "sluice_commit"
TAKE_BACK = "sluice_take_back"
_WAKE_UP = "sluice_wake_up"


def add_calls(engine_core: Any, wake_up: Any) -> None:
    """Give vLLM's class of engine processes these calls; repeatable. wake_up: its kind of message that says nothing."""
    setattr(engine_core, HAS_RECEIVED, has_received)
    setattr(engine_core, COMMIT, commit)
    setattr(engine_core, TAKE_BACK, take_back)
    setattr(engine_core, _WAKE_UP, wake_up)


def has_received(core: Any) -> bool | Future[bool]:
    """Return whether every worker has the last bucket of the push under way. Raises: what ended one's receiving.

    Of one worker that is this process the answer comes when it has, and costs one message to and fro.
    """
    if core.collective_rpc(_worker_pid) != [os.getpid()]:
        return all(core.collective_rpc(_worker_has_received))
    received: Future[bool] = Future()

    def answer(receiving: Future[Any]) -> None:
        error = receiving.exception()
        if error is None:
            received.set_result(True)
        else:
            received.set_exception(error)

    (receiving,) = core.collective_rpc(_worker_receiving)
    receiving.add_done_callback(answer)
    return received


def commit(core: Any, version: str, digest: str) -> float | Future[float]:
    """Freeze generation after the step under way, make what was received `version`, and go on, unless asleep.

    Returns how long generation stood still, in seconds. Raises, here or in the future: what a worker refuses the
    digest or the weights with; generation stands still then, and its requests keep their cache.
    """
    paused = core.pause_scheduler(mode="keep", clear_cache=False)
    if paused is None:
        return _load(core, version, digest)
    loaded: Future[float] = Future()

    def load(stood_still: Future[None]) -> None:
        try:
            stood_still.result()
            loaded.set_result(_load(core, version, digest))
        except Exception as error:  # the client's to hear, by the future
            loaded.set_exception(error)

    paused.add_done_callback(load)
    return loaded


def take_back(core: Any) -> None:
    """Take back all that was given up to sleep. Requests stay frozen until a commit, or vLLM's call to resume."""
    core.model_executor.wake_up(None)


def _load(core: Any, version: str, digest: str) -> float:
    begun = time.perf_counter()
    # All workers agree to what they received before the first one loads it.
    core.collective_rpc("update_weights", kwargs={"update_info": {"expected_digest": digest}})
    core.collective_rpc("finish_weight_update")
    core.set_weight_version(version)
    if core.model_executor.is_sleeping:  # without its cache it cannot generate: it goes on when it is woken
        return time.perf_counter() - begun
    core.resume_scheduler()
    # It is about to wait for a message before it looks for work again, since it had none while it stood still.
    core.input_queue.put_nowait((getattr(core, _WAKE_UP), None))
    return time.perf_counter() - begun


def _worker_pid(worker: Any) -> int:
    return os.getpid()


def _worker_receiving(worker: Any) -> Any:
    return worker.weight_transfer_engine.receiving()


def _worker_has_received(worker: Any) -> bool:
    return bool(_worker_receiving(worker).done() and _worker_receiving(worker).result() is not None)
