"""A vLLM scheduler that ends turns at their stop strings and sends one message per turn instead of one per token.

vLLM's own scheduler sends every token to the server's process, which looks for stop strings and aborts the request.
Handling single tokens takes most of the server's processor time.
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

# Largest number of held tokens of one request; each takes half a kilobyte.
_MAX_HELD = 64


@dataclass
class _HeldOutputs:
    """Outputs of a request that are not sent yet."""

    client: int  # vLLM's number of the client that sent the request
    outputs: list[EngineCoreOutput] = field(default_factory=list)  # one per engine step, oldest first


class TurnScheduler(Scheduler):  # type: ignore[misc]
    """Sends outputs of FINAL_ONLY requests when they end, after 64 tokens, and at a pause.

    A pause is complete only when all held outputs were sent: vLLM stamps a token's policy version when it is sent, and
    versions change only in pauses.
    A request with `extra_args["stop_strings"]` ends with the token in which the first stop string ends.
    """

    def __init__(self, vllm_config: Any, *args: Any, **settings: Any) -> None:
        super().__init__(vllm_config, *args, **settings)
        self._held: dict[str, _HeldOutputs] = {}
        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        self._stops = StopStrings(tokenizer) if has_fast_tokenizer(tokenizer) else None

    def has_requests(self) -> bool:
        """Return whether the engine needs a step: for requests, or to send held outputs during a pause."""
        return bool(super().has_requests() or (self._held and self._is_paused()))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        answers = super().update_from_output(scheduler_output, model_runner_output)
        for client, answer in answers.items():
            released = (self._hold_or_release(client, output) for output in answer.outputs)
            answer.outputs = [output for output in released if output is not None]
        for request_id in [request_id for request_id in self._held if request_id not in self.requests]:
            del self._held[request_id]  # aborted by its client
        if self._is_paused():
            self._send_held(answers)
        return {client: answer for client, answer in answers.items() if _has_content(answer)}

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, is_stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        params = request.sampling_params
        strings = params.extra_args.get("stop_strings") if params is not None and params.extra_args else None
        if not strings or not tokens or self._stops is None:
            return tokens, is_stopped
        found = self._stops.find(request.output_token_ids, tuple(strings))
        has_ended = is_stopped and request.status == RequestStatus.FINISHED_STOPPED
        if found is None or (has_ended and self._stops.text_of(tokens[-1]) not in found):
            return tokens, is_stopped  # an end token's name is not written text: ">" does not end in it
        # A stop string takes precedence over a length limit reached by the same token.
        request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, found
        return tokens, True

    def _is_paused(self) -> bool:
        return bool(self.pause_state != PauseState.UNPAUSED)

    def _hold_or_release(self, client: int, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return the output to send now, joined with held ones; None when it is held."""
        held = self._held.get(output.request_id)
        if self._can_wait(output):
            held = held or self._held.setdefault(output.request_id, _HeldOutputs(client))
            held.outputs.append(output)
            if len(held.outputs) < _MAX_HELD:
                return None
            del self._held[output.request_id]
            return _join_outputs(held.outputs)
        if held is None:
            return output
        del self._held[output.request_id]
        return _join_outputs([*held.outputs, output])

    def _can_wait(self, output: EngineCoreOutput) -> bool:
        """Return whether this is only a token and its logprobs, of a FINAL_ONLY request."""
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

    def _send_held(self, answers: dict[int, EngineCoreOutputs]) -> None:
        """Add all held outputs to the answers."""
        for held in self._held.values():
            answer = answers.setdefault(held.client, EngineCoreOutputs())
            answer.outputs = [*answer.outputs, _join_outputs(held.outputs)]
        self._held.clear()


def _join_outputs(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the outputs of several steps of a request as one output."""
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


def _has_content(answer: EngineCoreOutputs) -> bool:
    return bool(answer.outputs or answer.scheduler_stats is not None or answer.finished_requests)
