"""The door to vLLM: one long-lived engine that generates, reports exact logprobs and versions, and takes new weights.

The rollout server owns one `Engine`. Tokens go in and tokens come out; nothing here knows of prompts' meaning,
environments or rewards. Only this file, `start.py`, `requests.py`, `turn_scheduler.py`, `vllm_plugin.py` and
`weights/` import vllm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from protocol.errors import NeighbourError
from protocol.settings.run_spec import EngineRequest
from rollout.engine.core_calls import COMMIT, HAS_RECEIVED, TAKE_BACK
from rollout.engine.generation import EngineStats, Generation, Sampling
from rollout.engine.probing import Probing
from rollout.engine.process_facts import endings, processes_of
from rollout.engine.receiving import until_received
from rollout.engine.requests import generation_of, probe_params, sampling_params, token_request
from rollout.engine.start import BOUNDARY, ends_turns, start_vllm

_SHUTDOWN_S = 5.0

T = TypeVar("T")


class Engine:
    """A running vLLM engine. Start it with `await Engine.start(spec)` inside the event loop that will use it."""

    @classmethod
    async def start(cls, spec: EngineRequest) -> Engine:
        """Return an engine with dummy weights for `spec.model`; takes 10 to 30 s on a CPU.

        Raises: SettingsError when vLLM refuses the settings, NeighbourError when its processes do not come up.
        """
        engine = cls(spec, start_vllm(spec))
        await engine._warm_up()
        return engine

    def __init__(self, spec: EngineRequest, llm: Any) -> None:
        self.spec = spec
        self.policy_version: int | None = None
        self._num_forgotten = self._num_committed = 0
        self._is_cache_fresh = False  # nothing was asked for since the weights came: their cache is empty
        self._llm = llm
        self._processes = processes_of(llm)
        # A seeded request whose prompt is prefilled in parts kills vLLM's engine on CPUs ("CPU Generator does not use
        # offset"): there the engine's own seed has to do.
        self._can_seed = not spec.on_cpus
        self._tokenizer = llm.get_tokenizer()
        self._ends_turns = ends_turns(llm)
        self._num_in_flight = 0
        self._num_output_tokens = 0
        self._paused_at: float | None = None
        self._update: dict[str, Any] | None = None  # of the push under way; None when none was prepared, or it ended
        self._is_received = False
        self._is_asleep = False
        self._probing = Probing(self._read)

    @property
    def generates_while_receiving(self) -> bool:
        """Whether a push comes into a second copy of the weights; without one it is loaded as it comes."""
        return self.spec.second_copy

    @property
    def is_alive(self) -> bool:
        """False as soon as vLLM's engine process is known to be gone; it never comes back."""
        return self._llm is not None and not self._llm.errored

    @property
    def stats(self) -> EngineStats:
        return EngineStats(self._num_in_flight, self._num_output_tokens, self._paused_at is not None)

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without adding special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, special tokens kept."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        """Return one generation; cancelling the call aborts it inside the engine.

        Raises: NeighbourError when the weights are not synced, the request is refused or the engine died.
        """
        if self.policy_version is None:
            raise NeighbourError(BOUNDARY, "serves nothing: its weights were not verified against the learner's")
        self._is_cache_fresh = False
        request = token_request(prompt_tokens, self._cache_salt())
        params = sampling_params(sampling, self._can_seed, self._ends_turns)
        self._num_in_flight += 1
        try:
            result = await self._finished(request, params, request_id)
        finally:
            self._num_in_flight -= 1
        generation = generation_of(result.outputs[0], self.decode(result.outputs[0].token_ids))
        self._num_output_tokens += len(generation.tokens)
        return generation

    async def probe(self, tokens: list[int]) -> list[float]:
        """Return the logprobs of tokens[1:], each given what stands before it, under the version held.

        Natural log at temperature 1. The first after a commit reads what requests would find cached, which is nothing:
        keys and values of older weights that were kept would show. Raises: NeighbourError when no weights are held.
        """
        if self.policy_version is None:
            raise NeighbourError(BOUNDARY, "holds no verified weights to probe")
        is_first, self._is_cache_fresh = self._is_cache_fresh, False
        return await self._probing.logprobs(tokens, self._cache_salt(), self.policy_version, is_first=is_first)

    def forget_weights(self) -> None:
        """Serve nothing until the next push, and never again what is cached of the weights so far.

        A push that is under way is not for who comes next: its commit is refused.

        Policy versions are numbered anew by each start of each run: without this, version 1 of one run would be
        generated from the keys and values that version 1 of another left for the same prompt.
        """
        self.policy_version = None
        self._is_received = False
        self._num_forgotten += 1
        self._probing.give_up()

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        """Start joining the learner's weight group; the engine goes on generating while the peers meet."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._abandon_update()
        await self._call(self._llm.shutdown_weight_transfer_engine(), timeout_s)
        request = WeightTransferInitRequest(init_info=init)
        await self._call(self._llm.init_weight_transfer_engine(request), timeout_s)

    async def prepare(self, update: dict[str, Any]) -> None:
        """Get ready for one push's buckets, which take the place of those of a push that was never committed."""
        await self._abandon_update()
        if self._is_asleep:
            await self._call(self._llm.wake_up(["weights"]))  # not the cache: the learner is still on the device
        if not self.generates_while_receiving:
            self.policy_version = None  # first: who wakes the engine meanwhile must not have it go on
            await self._pause()
        self._update = update
        await self._call(self._llm.start_weight_update())
        if self.generates_while_receiving:
            await self._update_weights(update)

    async def receive(self) -> None:
        """Return when the last bucket has come. Raises: NeighbourError with what ended the receiving."""
        if self._update is None:
            raise NeighbourError(BOUNDARY, "cannot receive: no push was prepared")
        num_forgotten = self._num_forgotten
        if self.generates_while_receiving:
            ask = partial(self._llm.engine_core.call_utility_async, HAS_RECEIVED)
            await self._call(until_received(ask, lambda: self.is_alive))
        else:
            await self._update_weights(self._update)
        self._is_received = num_forgotten == self._num_forgotten

    async def commit(self, version: int, digest: str) -> float:
        """Make the received weights policy version `version`, if they have this digest, and go on generating.

        Requests in flight freeze after their current token and keep their cache. Returns how long, in seconds.
        Raises: NeighbourError otherwise; the engine then stays paused and unsynced until a push succeeds.
        """
        if not self._is_received:
            raise NeighbourError(BOUNDARY, "cannot commit: nothing was received for whom it serves now")
        num_forgotten, paused_at = self._num_forgotten, self._paused_at
        self._is_received = False
        self._paused_at = paused_at or perf_counter()
        committing = asyncio.ensure_future(self._send_commit(version, digest))
        try:
            await asyncio.sleep(0)  # it is sent: what vLLM is sent behind it waits for its weights
            self._probing.begin(self._cache_salt())
            pause_s = await committing
        except BaseException:
            committing.cancel()
            self._probing.give_up()
            self.policy_version = None
            raise
        self._update, self._paused_at = None, self._paused_at if self._is_asleep else None
        if num_forgotten != self._num_forgotten:
            raise NeighbourError(BOUNDARY, f"serves another run, since before version {version} was loaded")
        self.policy_version, self._is_cache_fresh = version, True
        return perf_counter() - paused_at if paused_at is not None else float(pause_s)

    async def sleep(self) -> None:
        """Freeze generation; weights go to the host's memory and the cache is dropped (not on CPUs). Requests stay."""
        if not self._is_asleep:
            self._is_asleep, self._paused_at = True, self._paused_at or perf_counter()
            await self._call(self._llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        """Take back what `sleep` gave up. With weights that are known generation goes on, else when they come."""
        if self._is_asleep and self.policy_version is not None:
            await self._call(self._llm.wake_up())
            self._paused_at = None
        elif self._is_asleep:  # what is in flight would be written by no version's weights, and pass for the last one's
            await self._call(self._llm.engine_core.call_utility_async(TAKE_BACK))
        self._is_asleep = False

    async def leave(self) -> None:
        """Leave the weight group; an engine whose weights are intact goes on generating with them."""
        await self._abandon_update()
        await self._call(self._llm.shutdown_weight_transfer_engine())
        if self._paused_at is not None and self.policy_version is not None and not self._is_asleep:
            await self._resume()

    def shutdown(self) -> None:
        """Stop vLLM's processes; returns when they are gone, after at most about 10 s. The engine is of no use then."""
        llm, self._llm, self.policy_version = self._llm, None, None
        if llm is not None:
            llm.shutdown(timeout=_SHUTDOWN_S)
            llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM closes its sockets, but not their context
            # Its __del__ calls it again, which fails noisily while the interpreter ends.
            llm.shutdown = lambda timeout=None: None

    async def _send_commit(self, version: int, digest: str) -> Any:
        # Nothing is awaited between these lines: a request that vLLM got before would be cached under the new name.
        self._num_committed += 1
        return await self._call(self._llm.engine_core.call_utility_async(COMMIT, str(version), digest))

    def _cache_salt(self) -> str:
        """Return a name that no other weights in this process have: vLLM shares cached prefixes under one salt."""
        return f"{self._num_forgotten}/{self._num_committed}"

    async def _update_weights(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    async def _pause(self) -> None:
        """Freeze all generation after the current token; requests in flight keep their cache.

        Returns when the current engine step has ended (one step: milliseconds). vLLM's own `pause_generation` adds a
        fixed sleep of 20 ms after the same call, which its comment says is not needed for correctness.
        """
        self._paused_at = self._paused_at or perf_counter()  # also if this call is given up: it may pause all the same
        await self._call(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def _resume(self) -> None:
        await self._call(self._llm.resume_generation())
        self._paused_at = None

    async def _abandon_update(self) -> None:
        """End an update that was begun and never finished, which vLLM's workers would otherwise wait for."""
        self._is_received = False
        if self._update is not None:
            with suppress(NeighbourError):  # the workers answer by refusing
                await self._update_weights({"expected_digest": ""})
            self._update = None

    async def _warm_up(self) -> None:
        """Generate once: vLLM's first request takes seconds on a CPU, which no run's first lease should wait for."""
        params = sampling_params(Sampling(2, 1.0), self._can_seed, self._ends_turns)
        await self._finished(token_request([1, 1], "warm-up"), params, "warm-up")

    async def _read(self, tokens: list[int], salt: str, reads_cache: bool) -> Any:
        request = token_request(tokens, salt)
        return await self._finished(request, probe_params(reads_cache), f"probe-{salt}-{id(request)}")

    async def _finished(self, request: Mapping[str, Any], params: Any, request_id: str) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        result = None
        try:
            async for output in self._llm.generate(request, params, request_id):
                result = output
        except (EngineDeadError, EngineGenerateError) as error:
            how = f" ({said})" if (said := endings(self._processes)) else ""
            raise NeighbourError(BOUNDARY, f"request {request_id} died with the engine{how}: {error}") from error
        except (VLLMClientError, ValueError) as error:
            raise NeighbourError(BOUNDARY, f"request {request_id} was refused: {error}") from error
        if result is None:
            raise NeighbourError(BOUNDARY, f"request {request_id} ended without a result")
        return result

    async def _call(self, call: Awaitable[T], timeout_s: float | None = None) -> T:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError as error:
            raise NeighbourError(BOUNDARY, f"did not answer within {timeout_s} s") from error
        except Exception as error:  # vLLM raises bare Exception for a call that failed in its engine process
            raise NeighbourError(BOUNDARY, f"{type(error).__name__}: {error}") from error
