"""Samples from vLLM: the base model, or one saved adapter for each request.

The engine starts with the first request, and again after it died: requests in flight then run again.
"""

import asyncio
import itertools
import json
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.tinker.bodies import Sample, SamplingParams
from deploy.tinker.journal import Journal, Request, Result, SamplerRow
from deploy.tinker.wire import RequestError, SampledSequence, write_samples
from protocol.errors import NeighbourError
from protocol.settings.run_spec import EngineRequest
from rollout.engine.start import start_vllm

_log = logging.getLogger("tinker")
_ATTEMPTS = 3  # starts of the engine for one request
_NAN = float("nan")


class Sampling:
    """Runs sample requests in the event loop."""

    def __init__(
        self,
        journal: Journal,
        engine: EngineRequest,
        folder: Path,
        on_result: Callable[[str], None],
        start: Callable[[EngineRequest], Any] = start_vllm,
    ) -> None:
        """engine: loads the base model's weights. on_result: called with a request's id when its result is written."""
        self._start = start
        self._journal, self._spec, self._folder, self._on_result = journal, engine, folder, on_result
        self._llm: Any = None
        self._starting = asyncio.Lock()
        self._names = itertools.count()
        self._places: dict[str, int] = {}  # folder of an adapter -> vLLM's number of it
        self._tasks: set[asyncio.Task[None]] = set()
        for request in journal.open_requests(of_samples=True):
            self.add(request)

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    def add(self, request: Request) -> None:
        """Run a request of the journal."""
        task = asyncio.get_running_loop().create_task(self._run(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop vLLM's processes, and those of an engine that is starting: they outlive a service that a signal ends."""
        if self._llm is not None:
            self._llm.shutdown(timeout=5.0)
        for child in multiprocessing.active_children():
            child.terminate()

    async def _run(self, request: Request) -> None:
        try:
            content = await self._sample(request)
            result = Result("protobuf", content)
        except RequestError as error:
            result = Result.failure(str(error), "user")
        except Exception as error:
            _log.exception("request failed  id=%s verb=asample", request.id)
            result = Result.failure(f"{type(error).__name__}: {error}", "server")
        await asyncio.to_thread(self._journal.finish, request, result)
        self._on_result(request.id)

    async def _sample(self, request: Request) -> bytes:
        body = Sample.model_validate_json(request.body)
        sampler = self._journal.sampler(body.sampling_session_id)
        if sampler is None:
            raise RequestError(f"The sampling session {body.sampling_session_id} is not known. Create one.")
        tokens = _prompt(body, self._spec.max_model_len)
        from vllm.v1.engine.exceptions import EngineDeadError

        for attempt in range(_ATTEMPTS):
            llm = None
            self._check_weights(sampler)  # vLLM ends with all its requests when it cannot load an adapter
            try:
                llm = await self._engine()
                return await self._generate(llm, body, tokens, sampler)
            except (EngineDeadError, NeighbourError):  # it died at work, or as it started
                if attempt + 1 == _ATTEMPTS:
                    raise
                await self._drop(llm)
        raise AssertionError

    def _check_weights(self, sampler: SamplerRow) -> None:
        """Raises: RequestError for weights that are gone, or of a rank that the engine does not load."""
        if not sampler.place:
            return
        try:
            rank = json.loads((self._folder / sampler.place / "adapter_config.json").read_bytes())["r"]
        except FileNotFoundError:
            raise RequestError(
                f"The weights {sampler.path} are gone: deleted, or followed by newer ones of a sampling session. "
                "Save them by name."
            ) from None
        most = self._spec.engine_args.get("max_lora_rank", rank)
        if rank > most:
            raise RequestError(
                f"The weights {sampler.path} have rank {rank}. Start the service with --max-rank {rank}."
            )

    async def _generate(self, llm: Any, body: Sample, tokens: list[int], sampler: SamplerRow) -> bytes:
        from vllm.exceptions import VLLMClientError

        prompt = {"prompt_token_ids": tokens}
        result = None
        try:
            params = _vllm_params(body, len(tokens), self._spec)
            async for output in llm.generate(
                prompt, params, f"sample-{next(self._names)}", lora_request=self._lora(sampler)
            ):
                result = output
        except (ValueError, VLLMClientError) as error:
            raise RequestError(f"vLLM refuses the request: {error}") from error
        assert result is not None
        k, of_samples = body.topk_prompt_logprobs, body.topk_sample_logprobs
        wants = bool(body.prompt_logprobs) or k > 0
        given = enumerate(result.prompt_logprobs or [] if wants else [])
        first = len(tokens) - (body.prompt_logprobs_last_n or len(tokens))
        rows = [_logprobs_of(row if place >= first else None) for place, row in given]
        found = [row.get(token, _NAN) for row, token in zip(rows, tokens, strict=True)] if wants else None
        return write_samples([_sequence(each) for each in result.outputs], found, rows, k, of_samples)

    def _lora(self, sampler: SamplerRow) -> Any:
        from vllm.lora.request import LoRARequest

        if not sampler.place:
            return None
        number = self._places.setdefault(sampler.place, len(self._places) + 1)
        return LoRARequest(sampler.place, number, str(self._folder / sampler.place))

    async def _engine(self) -> Any:
        async with self._starting:
            if self._llm is None or self._llm.errored:
                _log.warning("the engine starts  model=%s", self._spec.model)
                self._llm = await asyncio.to_thread(self._start, self._spec)
            return self._llm

    async def _drop(self, llm: Any) -> None:
        async with self._starting:
            if llm is not None and self._llm is llm:
                self._llm = None
                llm.shutdown(timeout=1.0)


def sequence_ids(body: Sample, sampler: SamplerRow, base: str) -> list[str]:
    """Return a name for each sample, which begins with the weights that write it."""
    weights = f"{sampler.path or base}@{sampler.step}"
    return [f"{weights}/{sampler.id}/{body.seq_id}/{number}" for number in range(body.num_samples)]


def _prompt(body: Sample, max_tokens: int) -> list[int]:
    """Return the prompt's tokens. Raises: RequestError for a request that is not served."""
    for name, value in (
        ("target_prompt_logprobs", body.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", body.prompt_alt_tokens_k > 0),
    ):
        if value:
            raise RequestError(f"{name} is not served. Leave it out.")
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise RequestError("The prompt has a chunk that is no text. Only encoded text is served.")
    tokens = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if not 1 <= len(tokens) < max_tokens:
        raise RequestError(f"The prompt has {len(tokens)} tokens. Give 1 to {max_tokens - 1}.")
    return tokens


def _vllm_params(body: Sample, num_prompt: int, spec: EngineRequest) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    given: SamplingParams = body.sampling_params
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    texts = [each for each in stop or [] if isinstance(each, str)]
    left = spec.max_model_len - num_prompt
    k = body.topk_prompt_logprobs
    return VllmParams(
        n=body.num_samples,
        max_tokens=min(given.max_tokens or left, left),
        temperature=given.temperature,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        # A seeded request kills vLLM on CPUs when its prompt is prefilled in parts.
        seed=None if spec.on_cpus else given.seed,
        stop=texts,
        stop_token_ids=[each for each in stop or [] if isinstance(each, int)],
        ignore_eos=stop == [],
        include_stop_str_in_output=True,
        detokenize=bool(texts),
        skip_special_tokens=False,
        logprobs=body.topk_sample_logprobs,
        prompt_logprobs=k if body.prompt_logprobs or k else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _sequence(output: Any) -> SampledSequence:
    tokens: Sequence[int] = output.token_ids
    rows = [_logprobs_of(row) for row in output.logprobs]
    logprobs = [row[token] for row, token in zip(rows, tokens, strict=True)]
    return SampledSequence(tokens, logprobs, output.finish_reason == "length", rows)


def _logprobs_of(row: Mapping[int, Any] | None) -> dict[int, float]:
    """Return token -> logprob; nothing for the first token, which has none."""
    return {token: float(each.logprob) for token, each in (row or {}).items()}
