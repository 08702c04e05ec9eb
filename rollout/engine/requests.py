"""Converts requests to vLLM's types and its outputs to `Generation`."""

from collections.abc import Sequence
from typing import Any

from rollout.engine.generation import Generation, Sampling


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
