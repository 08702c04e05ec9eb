"""Calls that Sluice adds to vLLM's engine process, so that a push costs generation the time of one message.

vLLM's client calls methods of `EngineCore` by name, between two engine steps. With vLLM's own calls, a commit would
need five messages, each queued behind other work while nothing is generated.
"""

import time
from concurrent.futures import Future
from typing import Any

HAS_RECEIVED = "sluice_has_received"
COMMIT = "sluice_commit"
WAKE_FROZEN = "sluice_wake_frozen"
_WAKE_UP = "sluice_wake_up"


def add_calls(engine_core: Any, wake_up: Any) -> None:
    """Add the calls to vLLM's EngineCore class; repeatable. wake_up: vLLM's message type without content."""
    setattr(engine_core, HAS_RECEIVED, has_received)
    setattr(engine_core, COMMIT, commit)
    setattr(engine_core, WAKE_FROZEN, wake_frozen)
    setattr(engine_core, _WAKE_UP, wake_up)


def has_received(core: Any) -> bool:
    """Return whether every worker has the last bucket of the push. Raises: the error that stopped a worker's push."""
    return all(core.collective_rpc(_worker_has_received))


def commit(core: Any, version: str, digest: str) -> float | Future[float]:
    """Pause after the current engine step, load the received weights as `version`, and resume unless asleep.

    Returns the pause in seconds. Raises, here or in the future: a worker's refusal of the digest or the weights.
    Generation then stays paused, and its requests keep their cache.
    """
    paused = core.pause_scheduler(mode="keep", clear_cache=False)
    if paused is None:
        return _load(core, version, digest)
    loaded: Future[float] = Future()

    def load(pausing: Future[None]) -> None:
        try:
            pausing.result()
            loaded.set_result(_load(core, version, digest))
        except Exception as error:  # reported to the client by the future
            loaded.set_exception(error)

    paused.add_done_callback(load)
    return loaded


def wake_frozen(core: Any) -> None:
    """Take back all memory after a sleep without resuming, which vLLM's own call always does."""
    core.model_executor.wake_up(None)


def _load(core: Any, version: str, digest: str) -> float:
    begun = time.perf_counter()
    # All workers confirm the digest before the first one loads.
    core.collective_rpc("update_weights", kwargs={"update_info": {"expected_digest": digest}})
    core.collective_rpc("finish_weight_update")
    core.set_weight_version(version)
    if core.model_executor.is_sleeping:  # it cannot generate without its cache; waking resumes it
        return time.perf_counter() - begun
    core.resume_scheduler()
    # The paused loop has no work and waits for a message before it looks for work again.
    core.input_queue.put_nowait((getattr(core, _WAKE_UP), None))
    return time.perf_counter() - begun


def _worker_has_received(worker: Any) -> bool:
    receiving = worker.weight_transfer_engine.receiving()
    return bool(receiving.done() and receiving.result() is not None)
