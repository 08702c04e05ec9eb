"""When an engine that wakes resumes its requests, by vLLM's own rules of sleeping and waking, and when it hangs."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import NeighbourError
from rollout.engine.engine import Engine
from tests.fakes.tiny_models import engine_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def core_without_a_model() -> Any:
    """Return vLLM's core with requests in flight, whose workers agree to everything."""
    from vllm.v1.core.sched.interface import PauseState  # importing it warns
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    class Memory(Executor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.sleeping_tags: set[str] = set()

        def _init_executor(self) -> None: ...

        def check_health(self) -> None: ...

        def collective_rpc(self, *_: Any, **__: Any) -> Any: ...

    class Core(EngineCore):  # type: ignore[misc]
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(set_pause_state=self._set_pause_state)
            self.model_executor = Memory()
            self.is_generating, self.num_pauses = True, 0

        def _set_pause_state(self, state: PauseState) -> None:
            self.is_generating = state == PauseState.UNPAUSED
            self.num_pauses += not self.is_generating

        def _finish_pause(self, clear_cache: bool) -> None: ...

    return Core()


class Vllm:
    """A client of such a core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        resources = SimpleNamespace(engine_manager=None)
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause, resources=resources)
        scheduler = SimpleNamespace(scheduler_cls="", max_num_seqs=8)
        cache = SimpleNamespace(num_gpu_blocks=None, block_size=16, enable_prefix_caching=True)
        model = SimpleNamespace(try_get_generation_config=dict)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler, cache_config=cache, model_config=model)
        self.errored = False
        self.has_met = asyncio.Event()

    def get_tokenizer(self) -> Any:
        return None

    async def sleep(self, level: int, mode: Any) -> None:
        self._core.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        return self._core.wake_up(tags)

    async def shutdown_weight_transfer_engine(self) -> None: ...

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.has_met.wait()

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, request: Any) -> None: ...

    async def finish_weight_update(self, version: str) -> None: ...

    async def _pause(self, mode: Any, clear_cache: bool) -> None:
        self._core.pause_scheduler(mode, clear_cache)
        await asyncio.sleep(0.05)  # the answer is on its way


@pytest.mark.parametrize("is_broken", [False, True])
async def test_requests_resume_after_a_sleep_unless_the_weights_have_no_version(is_broken: bool) -> None:
    core = core_without_a_model()
    engine = Engine(engine_of("model", second_copy=False), Vllm(core))
    engine.policy_version = 1
    await engine.sleep()
    if is_broken:  # as `prepare` leaves it until a commit
        engine.policy_version = None
    await engine.wake()

    assert core.is_generating is not is_broken
    assert core.model_executor.is_sleeping is is_broken
    assert engine.stats.is_paused is is_broken


async def test_commit_of_an_engine_that_sleeps_loads_and_waking_resumes_it() -> None:
    core = core_without_a_model()
    engine = Engine(engine_of("model", second_copy=False), Vllm(core))
    await engine.sleep()
    engine._is_received = True
    await engine.commit(1, "digest")
    was_generating = core.is_generating
    await engine.wake()

    assert (was_generating, core.is_generating) == (False, True)
    assert not core.model_executor.is_sleeping


async def test_commit_of_an_engine_that_was_woken_without_a_version_takes_its_memory_back() -> None:
    core = core_without_a_model()
    engine = Engine(engine_of("model", second_copy=False), Vllm(core))
    await engine.sleep()
    await engine.wake()
    engine._is_received = True
    await engine.commit(1, "digest")

    assert core.is_generating
    assert not core.model_executor.is_sleeping


async def test_an_engine_that_is_woken_while_a_push_begins_stays_paused() -> None:
    core = core_without_a_model()
    engine = Engine(engine_of("model", second_copy=False), Vllm(core))
    engine.policy_version = 1
    await engine.sleep()
    preparing = asyncio.ensure_future(engine.prepare({}))
    while core.num_pauses < 2:  # the first was for its sleep
        await asyncio.sleep(0)
    await engine.wake()
    await preparing

    assert not core.is_generating


async def test_an_engine_whose_join_never_ends_is_not_alive_after_two_deadlines() -> None:
    llm = Vllm(core_without_a_model())
    engine = Engine(engine_of("model"), llm)
    with pytest.raises(NeighbourError, match="did not answer within"):
        await engine.join_weights({}, 0.05)
    was_alive = engine.is_alive
    await asyncio.sleep(0.06)
    is_alive = engine.is_alive
    llm.has_met.set()
    await asyncio.sleep(0)

    assert (was_alive, is_alive, engine.is_alive) == (True, False, True)
