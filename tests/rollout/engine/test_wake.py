"""Whether an engine that wakes goes on with what is in flight, on vLLM's own rules of sleeping and waking."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engine.core_calls import add_calls
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

    add_calls(Core, "wake up")
    return Core()


class Vllm:
    """A client of such a core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        resources = SimpleNamespace(engine_manager=None)
        self.engine_core = SimpleNamespace(
            call_utility_async=self._call, pause_scheduler_async=self._pause, resources=resources
        )
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=""))

    def get_tokenizer(self) -> Any:
        return None

    async def sleep(self, level: int, mode: Any) -> None:
        self._core.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        return self._core.wake_up(tags)

    async def start_weight_update(self) -> None: ...

    async def _pause(self, mode: Any, clear_cache: bool) -> None:
        self._core.pause_scheduler(mode, clear_cache)
        await asyncio.sleep(0.05)  # the answer is on its way

    async def _call(self, method: str) -> Any:
        return getattr(self._core, method)()


@pytest.mark.parametrize("is_broken", [False, True])
async def test_what_is_in_flight_goes_on_after_a_sleep_unless_a_push_has_left_weights_of_no_version(
    is_broken: bool,
) -> None:
    core = core_without_a_model()
    engine = Engine(engine_of("model", second_copy=False), Vllm(core))
    engine.policy_version = 1
    await engine.sleep()
    if is_broken:  # as `prepare` has it, until a commit: what is written meanwhile would pass for version 1's
        engine.policy_version = None
    await engine.wake()

    assert not core.model_executor.is_sleeping
    assert core.is_generating is not is_broken
    assert engine.stats.is_paused is is_broken


async def test_an_engine_that_is_woken_while_a_push_begins_stands_still() -> None:
    core = core_without_a_model()
    engine = Engine(engine_of("model", second_copy=False), Vllm(core))
    engine.policy_version = 1
    await engine.sleep()
    preparing = asyncio.ensure_future(engine.prepare({}))
    while core.num_pauses < 2:  # the first was for its sleep
        await asyncio.sleep(0)
    await engine.wake()
    await preparing

    assert not core.model_executor.is_sleeping
    assert not core.is_generating
