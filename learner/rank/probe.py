"""A fixed text whose logprobs tell whether a server computes with the weights that it was pushed.

The digest says that the bytes arrived. They may still have been loaded wrongly, as tied embeddings are when only one of
their two copies is replaced, or not at all: requests then succeed, with every logprob off.
"""

import math
from collections.abc import Sequence

import numpy as np

from learner.models.policy import PolicyEngine
from learner.packing.micro_batch import LearnerSample, make_micro_batch
from protocol.settings.settings import Settings

# More than a block of vLLM's cache, which has 128 tokens on CPUs: what is cached of older weights is noticed too.
_NUM_TOKENS = 136
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
# What two ways of computing differ by: up to so many times the largest difference of a good push, and this at least.
_NOISE_FACTOR = 8.0
_LEAST_NOISE = 0.01  # of the tolerance
# Where a push changed more than noise, weights that were left behind differ by more than this part of the change.
_PART_OF_CHANGE = 0.125


class Probe:
    """The text, what the learner computes of it now, and what may differ. Differences are the largest, in nats."""

    def __init__(self, policy: PolicyEngine, settings: Settings) -> None:
        weights = settings.weights
        self._policy = policy
        self._tolerance = weights.probe_tolerance or _TOLERANCE[settings.policy.dtype]
        num_tokens = min(_NUM_TOKENS, settings.rollout.max_context_tokens - 1) if weights.probe else 0
        self.tokens = _drawn(policy.vocab_size, settings.run.seed, num_tokens)
        self._expected: list[float] = []
        self._change = 0.0  # between what the learner computed at the last two pushes
        self._noise = 0.0  # the largest difference of a server that was found right

    def expect(self) -> None:
        """Take in the learner's own logprobs of tokens[1:]; all ranks at once."""
        if not self.tokens:
            return
        is_written = np.ones(len(self.tokens), np.bool_)
        is_written[0] = False
        nothing = np.zeros(len(self.tokens), np.float32)
        sample = LearnerSample(np.array(self.tokens, np.int32), is_written, nothing, 0.0)
        logprobs = self._policy.logprobs(make_micro_batch([sample]), temperature=1.0)
        before, self._expected = self._expected, [float(logprob) for logprob in logprobs]
        # A push of the same weights once more changes nothing; who missed the one before is still where it was.
        self._change = (_largest(before, self._expected) if before else 0.0) or self._change

    def fault_of(self, server: str, logprobs: Sequence[float]) -> str | None:
        """Return what is wrong with a server's logprobs of tokens[1:], None where they are the learner's."""
        if len(logprobs) != len(self._expected):
            return f"{server} answered {len(logprobs)} logprobs for the {len(self._expected)} that it was asked for"
        difference = _largest(self._expected, logprobs)
        said = f"{server} computes other logprobs than the learner after the push: they differ by up to"
        if not difference <= self._tolerance:  # a NaN is no match either
            return (
                f"{said} {difference:.2g} nats, more than {self._tolerance:g}. Set weights.probe_tolerance if the "
                "precision explains it"
            )
        noise = _NOISE_FACTOR * max(self._noise, _LEAST_NOISE * self._tolerance)
        if self._change > noise and difference > max(noise, _PART_OF_CHANGE * self._change):
            return (
                f"{said} {difference:.2g} nats, where the push changed them by {self._change:.2g} and good pushes "
                f"differed by {self._noise:.2g}: some weights are not of this version"
            )
        self._noise = max(self._noise, difference)
        return None


def _largest(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference, infinite where one is no number."""
    differences = [abs(a - b) for a, b in zip(some, others, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _drawn(vocab_size: int, seed: int, num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, num_tokens)]
