"""One long-lived vLLM engine that generates tokens with exact logprobs and versions, and receives weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, TypeVar

from protocol.errors import NeighbourError
from protocol.settings.run_spec import EngineRequest
from protocol.weights.group import PEER_LOST, PeerLostError
from rollout.engine.generation import EngineStats, Generation, Sampling
from rollout.engine.start import BOUNDARY, ends_of, ends_turns, follow_tokens, limits_of, start_vllm
from rollout.engine.vllm_plugin import HAS_RECEIVED, describe_endings, processes_of

_SHUTDOWN_S = 5.0
_POLL_EVERY_S = 0.01
_CHECK_ALIVE_EVERY_S = 0.05
_JOIN_PATIENCE = 2.0  # deadlines after which an unanswered join means that vLLM hangs

T = TypeVar("T")


class Engine:
    """A running vLLM engine, to be used in the event loop that started it."""

    @classmethod
    async def start(cls, spec: EngineRequest) -> Engine:
        """Return an engine with dummy weights for `spec.model`; takes 10 to 30 s on a CPU.

        Raises: SettingsError when vLLM refuses the settings, NeighbourError when its processes do not come up.
        """
        llm = start_vllm(spec)
        engine = cls(spec, llm)
        follow_tokens(llm, lambda request_id, num_tokens: engine.on_tokens(request_id, num_tokens))
        await engine._warm_up()
        return engine

    def __init__(self, spec: EngineRequest, llm: Any) -> None:
        self.spec = spec
        self.policy_version: int | None = None
        self.on_tokens: Callable[[str, int], None] = lambda request_id, num_tokens: None
        self._num_forgotten = self._num_committed = 0
        self._is_cache_fresh = False  # True: no request since the last commit, so the weights' cache is empty
        self._llm = llm
        self._processes = processes_of(llm)
        # On CPUs a seeded request whose prompt is prefilled in parts kills vLLM's engine ("CPU Generator does not use
        # offset"), so the engine's own seed is used there.
        self._can_seed = not spec.on_cpus
        self._tokenizer = llm.get_tokenizer()
        self._ends_turns = ends_turns(llm)
        self._end_tokens = ends_of(llm)
        self._limits = limits_of(llm)
        self._num_in_flight = 0
        self._num_output_tokens = 0
        self._paused_at: float | None = None
        self._joining: asyncio.Future[Any] | None = None  # vLLM's call for the latest weight group
        self._joining_ends_at = 0.0
        self._update: dict[str, Any] | None = None  # metadata of the push under way
        self._is_received = False
        self._is_asleep = False  # between `sleep` and `wake`
        self._is_memory_freed = False  # vLLM's memory, or a part of it, is given away

    @property
    def generates_while_receiving(self) -> bool:
        """Whether a push goes into a second copy of the weights."""
        return self.spec.second_copy

    @property
    def is_alive(self) -> bool:
        """False once vLLM's engine process has died, or waits in a join that no deadline ends."""
        is_joining = self._joining is not None and not self._joining.done()
        hangs = is_joining and perf_counter() > self._joining_ends_at
        return self._llm is not None and not self._llm.errored and not hangs

    @property
    def stats(self) -> EngineStats:
        return EngineStats(self._num_in_flight, self._num_output_tokens, self._paused_at is not None, *self._limits)

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._tokenizer

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn, besides the tokenizer's own end token."""
        return self._end_tokens

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` without special tokens."""
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
            result = await self._run_request(request, params, request_id)
        finally:
            self._num_in_flight -= 1
        generation = generation_of(result.outputs[0], self.decode(result.outputs[0].token_ids))
        self._num_output_tokens += len(generation.tokens)
        return generation

    async def probe(self, tokens: list[int]) -> list[float]:
        """Return the logprobs of tokens[1:] under the held version, natural log at temperature 1.

        Raises: NeighbourError when no weights are held, or when keys and values of older weights are still cached: the
        first probe after a commit reads the cache.
        """
        if self.policy_version is None:
            raise NeighbourError(BOUNDARY, "holds no verified weights to probe")
        is_first, self._is_cache_fresh = self._is_cache_fresh, False
        request = token_request(tokens, self._cache_salt())
        result = await self._run_request(request, probe_params(reads_cache=is_first), f"probe-{id(request)}")
        if is_first and result.num_cached_tokens:
            held = f"{result.num_cached_tokens} tokens' keys and values cached under other weights"
            raise NeighbourError(BOUNDARY, f"would continue from {held} than version {self.policy_version}'s")
        return list(result.prompt_logprobs.logprobs)

    def forget_weights(self) -> None:
        """Serve nothing until the next push, and never use the current prefix cache again. A push under way is refused.

        Without this, version 1 of one run would read the keys and values that version 1 of another run cached.
        """
        self.policy_version = None
        self._is_received = False
        self._num_forgotten += 1

    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        """Start to join the learner's weight group; generation continues."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._abandon_update()
        await self._call(self._llm.shutdown_weight_transfer_engine(), timeout_s)
        request = WeightTransferInitRequest(init_info=init)
        # Over NCCL the join of a lost peer blocks vLLM's workers for ever. A cancelled call would hide that.
        self._joining = asyncio.ensure_future(self._llm.init_weight_transfer_engine(request))
        self._joining.add_done_callback(lambda joining: joining.cancelled() or joining.exception())
        self._joining_ends_at = perf_counter() + _JOIN_PATIENCE * timeout_s
        await self._call(asyncio.shield(self._joining), timeout_s)

    async def prepare(self, update: dict[str, Any]) -> None:
        """Get ready for one push's buckets. An uncommitted push is dropped."""
        await self._abandon_update()
        if self._is_memory_freed:  # without the cache: the learner still uses the device
            await self._call(self._llm.wake_up(["weights"]))
        if not self.generates_while_receiving:
            self.policy_version = None  # before the pause, so that a concurrent wake does not resume
            await self._pause()
        self._update = update
        await self._call(self._llm.start_weight_update())
        if self.generates_while_receiving:
            await self._update_weights(update)

    async def receive(self) -> None:
        """Return when the last bucket has arrived. Raises: NeighbourError with the reason why it did not."""
        if self._update is None:
            raise NeighbourError(BOUNDARY, "cannot receive: no push was prepared")
        num_forgotten = self._num_forgotten
        if self.generates_while_receiving:
            while not all(await self._ask_living(HAS_RECEIVED)):
                await asyncio.sleep(_POLL_EVERY_S)
        else:
            await self._update_weights(self._update)
        self._is_received = num_forgotten == self._num_forgotten

    async def commit(self, version: int, digest: str) -> float:
        """Make the received weights policy version `version`; returns the pause of generation in seconds.

        Raises: NeighbourError when the digest differs; the engine then stays paused until a push succeeds.
        """
        if not self._is_received:
            raise NeighbourError(BOUNDARY, "cannot commit: nothing was received for the attached run")
        num_forgotten = self._num_forgotten
        paused_at = self._paused_at or perf_counter()
        self._is_received = False
        try:
            await self._load(version, digest)
        except BaseException:
            self.policy_version = None
            raise
        self._update = None
        if num_forgotten != self._num_forgotten:
            raise NeighbourError(BOUNDARY, f"was attached to another run before version {version} was loaded")
        self.policy_version, self._is_cache_fresh = version, True
        return perf_counter() - paused_at

    async def sleep(self) -> None:
        """Freeze generation. On GPUs the weights go to host memory and the cache is dropped. Requests are kept."""
        if not self._is_asleep:
            self._is_asleep, self._is_memory_freed, self._paused_at = True, True, self._paused_at or perf_counter()
            await self._call(self._llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        """Take the memory back and resume generation, now if the weights are verified, otherwise in the next commit.

        vLLM resumes with all its memory: its requests would get tokens of weights that have no version.
        """
        if self._is_asleep:
            self._is_asleep = False
            if self.policy_version is not None:
                await self._resume()

    async def leave(self) -> None:
        """Leave the weight group; with intact weights, generation continues."""
        await self._abandon_update()
        await self._call(self._llm.shutdown_weight_transfer_engine())
        if self._paused_at is not None and self.policy_version is not None and not self._is_asleep:
            await self._resume()

    def shutdown(self) -> None:
        """Stop vLLM's processes; returns when they are gone, after at most about 10 s."""
        llm, self._llm, self.policy_version = self._llm, None, None
        if llm is not None:
            llm.shutdown(timeout=_SHUTDOWN_S)
            llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM closes only its sockets
            # Its __del__ calls shutdown again, which logs an error while the interpreter ends.
            llm.shutdown = lambda timeout=None: None

    async def _load(self, version: int, digest: str) -> None:
        """Load the received weights during a pause. After an error generation stays paused."""
        # No await between these lines: a request that vLLM already has must not be cached under the new salt.
        self._num_committed += 1
        await self._pause()
        await self._update_weights({"expected_digest": digest})  # all workers confirm it before the first one loads
        await self._call(self._llm.finish_weight_update(str(version)))
        if not self._is_asleep:
            await self._resume()

    async def _ask_living(self, method: str) -> Any:
        """Return a worker method's results. Raises: NeighbourError once vLLM is dead, which then never answers."""
        asked = asyncio.ensure_future(self._call(self._llm.collective_rpc(method)))
        try:
            while not (await asyncio.wait({asked}, timeout=_CHECK_ALIVE_EVERY_S))[0]:
                if not self.is_alive:
                    raise NeighbourError(BOUNDARY, f"died before it answered {method}")
            return asked.result()
        finally:
            asked.cancel()

    def _cache_salt(self) -> str:
        """Return a name unique to these weights: vLLM shares cached prefixes of one salt."""
        return f"{self._num_forgotten}/{self._num_committed}"

    async def _update_weights(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    async def _pause(self) -> None:
        """Freeze generation after the current engine step; requests keep their cache.

        vLLM's `pause_generation` also sleeps 20 ms.
        """
        self._paused_at = self._paused_at or perf_counter()  # set first: a cancelled call may still pause
        await self._call(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def _resume(self) -> None:
        await self._call(self._llm.wake_up() if self._is_memory_freed else self._llm.resume_generation())
        self._paused_at, self._is_memory_freed = None, False

    async def _abandon_update(self) -> None:
        """End an unfinished update, which vLLM's workers would wait for."""
        self._is_received = False
        if self._update is not None:
            with suppress(NeighbourError):  # the workers refuse the empty digest, which ends the update
                await self._update_weights({"expected_digest": ""})
            self._update = None

    async def _warm_up(self) -> None:
        """Generate once: vLLM's first request takes seconds on a CPU."""
        params = sampling_params(Sampling(2, 1.0), self._can_seed, self._ends_turns)
        await self._run_request(token_request([1, 1], "warm-up"), params, "warm-up")

    async def _run_request(self, request: Mapping[str, Any], params: Any, request_id: str) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        result = None
        try:
            async for output in self._llm.generate(request, params, request_id):
                result = output
        except (EngineDeadError, EngineGenerateError) as error:
            how = f" ({text})" if (text := describe_endings(self._processes)) else ""
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
        except Exception as error:  # vLLM passes errors of its processes on as text, in a bare Exception
            kind = PeerLostError if PEER_LOST in str(error) else NeighbourError
            raise kind(BOUNDARY, f"{type(error).__name__}: {error}") from error


def token_request(tokens: Sequence[int], cache_salt: str) -> dict[str, Any]:
    """Return tokens as a vLLM prompt that is neither rendered nor tokenised."""
    return {"type": "token", "prompt_token_ids": list(tokens), "cache_salt": cache_salt}


def sampling_params(sampling: Sampling, can_seed: bool, ends_turns: bool) -> Any:
    """Return vLLM's SamplingParams.

    can_seed: whether the engine supports a seed per request. ends_turns: whether the engine uses our scheduler, which
    finds stop strings in the engine's process; vLLM's own search needs the text of every token.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = list(sampling.stop)
    is_ours = ends_turns and all(stop)  # vLLM refuses an empty string
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else sampling.top_k,
        min_p=0.0 if sampling.greedy else sampling.min_p,
        logit_bias=dict(sampling.logit_bias) or None,
        stop=None if is_ours else stop,
        extra_args={"stop_strings": stop} if stop and is_ours else None,
        include_stop_str_in_output=True,
        seed=sampling.seed if can_seed else None,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=bool(stop) and not is_ours,  # one decode at the end is cheaper than one per token
        skip_special_tokens=False,
        skip_clone=True,  # each request has its own parameters, so vLLM need not copy them
    )


def probe_params(reads_cache: bool) -> Any:
    """Return the SamplingParams of a request for its prompt's logprobs.

    reads_cache: whether cached keys and values are used. vLLM computes no logprobs for cached tokens.
    """
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=not reads_cache,
    )


def generation_of(output: Any, text: str) -> Generation:
    """Return a finished vLLM output as a Generation. text: the decoded tokens."""
    return Generation(
        tokens=list(output.token_ids),
        logprobs=list(output.logprobs.logprobs),
        version_spans=tuple((span.start, span.end, int(span.version)) for span in output.weight_versions),
        finish_reason=output.finish_reason or "unknown",
        stop_string=output.stop_reason if isinstance(output.stop_reason, str) else None,
        text=text,
    )
