"""vLLM's scheduler, which ends turns at their stop strings and answers for a turn instead of for each of its tokens.

As it comes, vLLM sends every token and its logprobs from the engine's process to the server's, which looks for stop
strings there and has the engine give a finished turn up: by then the engine has begun on a token that nobody wants, and
taking tokens in one by one is what most of a rollout server's processor time goes into.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from rollout.engine.stop_strings import StopStrings, has_fast_tokenizer

# Tokens of one request that are kept back: each takes half a kilobyte here.
_MAX_KEPT = 64


@dataclass
class _Kept:
    """What a request has been given and the server has not."""

    client: int  # whom to answer
    outputs: list[EngineCoreOutput] = field(default_factory=list)  # one for each step, oldest first


class TurnScheduler(Scheduler):  # type: ignore[misc]
    """Requests that want their final output alone are answered when they end, when 64 tokens have come, and at a pause.

    A pause sends all that is kept back before it counts as done: vLLM names the policy version of a token when it
    sends it, and versions change in pauses alone.
    A request that has `extra_args["stop_strings"]` ends with the token that the first of them ends in.
    """

    def __init__(self, vllm_config: Any, *args: Any, **settings: Any) -> None:
        super().__init__(vllm_config, *args, **settings)
        self._kept: dict[str, _Kept] = {}
        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        self._stops = StopStrings(tokenizer) if has_fast_tokenizer(tokenizer) else None

    def has_requests(self) -> bool:
        """Return whether the engine is to make a step: also to send what a pause finds kept back."""
        return bool(super().has_requests() or (self._kept and self._is_paused()))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for client, answer in answers.items():
            ready = (self._ready(client, output) for output in answer.outputs)
            answer.outputs = [output for output in ready if output is not None]
        for name in [name for name in self._kept if name not in self.requests]:
            del self._kept[name]  # given up by its caller
        if self._is_paused():
            self._send_kept(answers)
        return {client: answer for client, answer in answers.items() if _says_something(answer)}

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, is_stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        params = request.sampling_params
        asked = params.extra_args.get("stop_strings") if params is not None and params.extra_args else None
        if not asked or not tokens or self._stops is None:
            return tokens, is_stopped
        found = self._stops.found(request.output_token_ids, tuple(asked))
        if found is None:
            return tokens, is_stopped
        # A turn that reached its length with this token ends by its stop string all the same.
        request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, found
        return tokens, True

    def _is_paused(self) -> bool:
        return bool(self.pause_state != PauseState.UNPAUSED)

    def _ready(self, client: int, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return what is to be sent now, with what was kept back of it; None: it is kept back too."""
        kept = self._kept.get(output.request_id)
        if self._can_wait(output):
            kept = kept or self._kept.setdefault(output.request_id, _Kept(client))
            kept.outputs.append(output)
            if len(kept.outputs) < _MAX_KEPT:
                return None
            del self._kept[output.request_id]
            return _joined(kept.outputs)
        if kept is None:
            return output
        del self._kept[output.request_id]
        return _joined([*kept.outputs, output])

    def _can_wait(self, output: EngineCoreOutput) -> bool:
        """Return whether this is a token and its logprobs alone, of a request that waits for its end."""
        request = self.requests.get(output.request_id)
        if request is None or output.finish_reason is not None or self.log_stats:
            return False
        params = request.sampling_params
        if params is None or params.stop or params.output_kind != RequestOutputKind.FINAL_ONLY:
            return False
        others = (
            output.new_prompt_logprobs_tensors,
            output.prompt_token_id_logprobs,
            output.pooling_output,
            output.kv_transfer_params,
            output.ec_transfer_params,
            output.routed_experts,
            output.new_sampling_mask,
            output.spec_decode_metrics,
        )
        return all(other is None for other in others)

    def _send_kept(self, answers: dict[int, EngineCoreOutputs]) -> None:
        """Put all that is kept back into the answers."""
        for kept in self._kept.values():
            answer = answers.setdefault(kept.client, EngineCoreOutputs())
            answer.outputs = [*answer.outputs, _joined(kept.outputs)]
        self._kept.clear()


def _joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return several steps' outputs of a request as one."""
    first, last = outputs[0], outputs[-1]
    if len(outputs) > 1:
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        last.prefill_stats = first.prefill_stats
        logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
        if logprobs:
            last.new_logprobs = LogprobsLists(
                np.concatenate([one.logprob_token_ids for one in logprobs]),
                np.concatenate([one.logprobs for one in logprobs]),
                np.concatenate([one.sampled_token_ranks for one in logprobs]),
            )
    return last


def _says_something(answer: EngineCoreOutputs) -> bool:
    return bool(answer.outputs or answer.scheduler_stats is not None or answer.finished_requests)
