"""What is asked of an engine and what it answers, as tokens. Plain data: no vLLM here.

Between `rollout.episodes.player`, which asks, and `rollout.engine.engine`, which answers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How to sample one generation. `greedy` overrides temperature and top_p; `stop` strings stay in the output."""

    max_tokens: int
    temperature: float
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    greedy: bool = False


@dataclass(frozen=True)
class Generation:
    """One model message as tokens.

    logprobs: natural log, of the distribution really sampled from (after temperature and top_p), one per token.
    version_spans: (start, end, policy version) over `tokens`, contiguous, in order.
    text: what `tokens` decode to. When a stop string ends inside a token, the token's remaining characters are in
    `text` too: the tokens are what is trained, so they are what counts.
    """

    tokens: list[int]
    logprobs: list[float]
    version_spans: tuple[tuple[int, int, int], ...]
    finish_reason: str
    stop_string: str | None
    text: str


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing now: requests inside it, tokens it has produced since its start."""

    num_in_flight: int
    num_output_tokens: int
    is_paused: bool
