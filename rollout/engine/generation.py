"""An engine's requests and results as tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How to sample one generation."""

    max_tokens: int
    temperature: float  # divisor of the logits
    top_p: float = 1.0  # share of probability to draw from; 1: all
    top_k: int = 0  # number of likeliest tokens to draw from; 0: all
    min_p: float = 0.0  # smallest probability, as a share of the likeliest token's
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token -> number added to its logit
    stop: tuple[str, ...] = ()  # strings that end the generation; they stay in its text
    seed: int | None = None  # own seed; None: the engine's
    greedy: bool = False  # the likeliest token each time; temperature, top_p, top_k and min_p are ignored


@dataclass(frozen=True)
class Generation:
    """One model message as tokens."""

    tokens: list[int]
    logprobs: list[float]  # natural log, one per token, of the sampled distribution (after temperature and top_p)
    version_spans: tuple[tuple[int, int, int], ...]  # (start, end, policy version) over `tokens`, contiguous
    finish_reason: str  # vLLM's: stop (end of text or a stop string), length, abort; unknown without one
    stop_string: str | None  # string of Sampling.stop that ended it, if any
    text: str  # text of all `tokens`, even after a stop string


@dataclass(frozen=True)
class EngineStats:
    """The engine's current load."""

    num_in_flight: int
    num_output_tokens: int  # tokens of finished generations
    is_paused: bool  # generation is paused for a weight push
    max_running: int | None = None  # requests that it decodes at a time; None: unknown
    cache_tokens: int | None = None  # tokens whose keys and values it holds; None: unknown
    shares_prompts: bool = True  # samples of a group hold their prompt's keys and values once
