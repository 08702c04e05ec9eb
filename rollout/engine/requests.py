"""Our requests and answers in vLLM's words: tokens and sampling in, a `Generation` out."""

from collections.abc import Sequence
from typing import Any

from rollout.engine.generation import Generation, Sampling


def token_request(tokens: Sequence[int], cache_salt: str) -> dict[str, Any]:
    """Return tokens in the form that vLLM takes without rendering or tokenising anything."""
    return {"type": "token", "prompt_token_ids": list(tokens), "cache_salt": cache_salt}


def sampling_params(sampling: Sampling, can_seed: bool, ends_turns: bool) -> Any:
    """Return how vLLM is to sample.

    can_seed: whether the engine survives a request with a seed of its own. ends_turns: whether its scheduler is ours,
    which looks for stop strings where the tokens are made; vLLM's own way needs the text of every token.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = list(sampling.stop)
    is_ours = ends_turns and all(stop)  # vLLM refuses an empty one
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
        detokenize=bool(stop) and not is_ours,  # one decode at the end is cheaper than one of each token
        skip_special_tokens=False,
        skip_clone=True,  # a request has parameters of its own: vLLM need not copy them deeply
    )


def probe_params(reads_cache: bool) -> Any:
    """Return the parameters of a request that is made for its prompt's logprobs alone.

    reads_cache: whether cached keys and values are used, whose own logprobs vLLM does not compute: none may be there.
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
    """Return a finished vLLM output, whose tokens decode to `text`."""
    return Generation(
        tokens=list(output.token_ids),
        logprobs=list(output.logprobs.logprobs),
        version_spans=tuple((span.start, span.end, int(span.version)) for span in output.weight_versions),
        finish_reason=output.finish_reason or "unknown",
        stop_string=output.stop_reason if isinstance(output.stop_reason, str) else None,
        text=text,
    )
