"""What is asked of an engine and what it answers, as tokens. Plain data: no vLLM here."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How to sample one generation."""

    max_tokens: int  # most tokens to write
    temperature: float  # divides the logits
    top_p: float = 1.0  # share of probability to draw from, likeliest tokens first; 1: all
    top_k: int = 0  # likeliest tokens to draw from; 0: all
    min_p: float = 0.0  # least share of the likeliest token's probability that a token is drawn with
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token -> added to its logit
    stop: tuple[str, ...] = ()  # strings that end the generation; they stay in its text
    seed: int | None = None  # of this generation; None: the engine's own
    greedy: bool = False  # True: the likeliest token each time; temperature, top_p, top_k and min_p are ignored


@dataclass(frozen=True)
class Generation:
    """One model message as tokens."""

    tokens: list[int]  # what was sampled
    # natural log, one per token, of the distribution really sampled from (after temperature and top_p)
    logprobs: list[float]
    version_spans: tuple[tuple[int, int, int], ...]  # (start, end, policy version) over `tokens`, contiguous, in order
    finish_reason: str  # vLLM's: stop (end of text or a stop string), length, abort; unknown when it gave none
    stop_string: str | None  # the one of Sampling.stop that ended it; None: something else did
    # what `tokens` decode to. When a stop string ends inside a token, the token's remaining characters are here too:
    # the tokens are what is trained, so they are what counts
    text: str


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing now."""

    num_in_flight: int  # requests inside it now
    num_output_tokens: int  # written since it was started, in generations that ended
    is_paused: bool  # True: generation stands still for a weight push
