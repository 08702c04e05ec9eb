"""A fixed text whose logprobs tell whether a server computes with the weights that it was pushed.

The digest says that the bytes arrived. They may still have been loaded wrongly, as tied embeddings are when only one of
their two copies is replaced, or not at all: requests then succeed, with every logprob off.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.policy import PolicyEngine
from protocol.settings.settings import Settings
from protocol.settings.zero_stage import zero_stage_of

# More than a block of vLLM's cache, which has 128 tokens on CPUs: what is cached of older weights is noticed too.
_NUM_TOKENS = 136
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
# Nothing is looked for behind a change that is not so many times what learner and servers differ by anyway on most
# tokens, in root mean squares: the learner's own rounding is part of both.
_LEAST_CHANGE = 4.0
_LEAST_NOISE = 1e-3  # of the tolerance
_NUM_READINGS = 256  # of good servers, by which noise is judged: what was once, is no noise of the servers of now
# How much of the change may seem to be missing, or to be there twice; and that in standard deviations of noise.
_LEAST_PART = 0.1
_DEVIATIONS = 8.0
# It is no fault where it rests on so few of the tokens alone: rounding has a mixture of experts send a token to another
# expert, on the learner at this push and on a server at the next. Weights that were left behind show in all tokens.
_FEW = 0.05


class Probe:
    """The text, what the learner computes of it now, and what may differ. Differences are in nats."""

    def __init__(self, policy: PolicyEngine, settings: Settings) -> None:
        weights = settings.weights
        self._policy = policy
        self._tolerance = weights.probe_tolerance or _TOLERANCE[settings.policy.dtype]
        num_tokens = min(_NUM_TOKENS, settings.rollout.max_context_tokens - 1) if weights.probe else 0
        self.tokens = _drawn(policy.vocab_size, settings.run.seed, num_tokens)
        self._is_collective = zero_stage_of(settings.learner.zero_stage, settings.policy.dtype) == 3
        self._thread = ThreadPoolExecutor(1, "probe")
        self._expected = np.zeros(0)
        self._change = np.zeros(0)  # of what the learner computes, by the last push that changed it; empty before
        self._readings: deque[float] = deque(maxlen=_NUM_READINGS)  # RMS of good servers, most tokens

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Have `expect` done at the end of the block, which reads the weights and leaves them as they are.

        It is done beside the block, on rank 0 alone; in ZeRO 3 before it, since all ranks pass through the model then.
        """
        if self._is_collective:
            self.expect()
            yield
            return
        expecting = self._thread.submit(self.expect)
        try:
            yield
        finally:
            expecting.result()

    def take_part(self) -> None:
        """Do what rank 0 needs of another rank for its `expecting`."""
        if self._is_collective:
            self.expect()

    def close(self) -> None:
        self._thread.shutdown()

    def expect(self) -> None:
        """Take in the learner's own logprobs of tokens[1:]; in ZeRO 3 all ranks at once."""
        if not self.tokens:
            return
        is_written = np.ones(len(self.tokens), np.bool_)
        is_written[0] = False
        nothing = np.zeros(len(self.tokens), np.float32)
        sample = LearnerSample(np.array(self.tokens, np.int32), is_written, nothing, 0.0)
        logprobs = self._policy.logprobs(make_micro_batch([sample]), temperature=1.0)
        before, self._expected = self._expected, np.array([float(logprob) for logprob in logprobs])
        # A push of the same weights once more changes nothing; who missed the one before is still where it was.
        if before.size and np.any(change := self._expected - before):
            self._change = change

    def fault_of(self, server: str, logprobs: Sequence[float]) -> str | None:
        """Return what is wrong with a server's logprobs of tokens[1:], None where they are the learner's."""
        if len(logprobs) != self._expected.size:
            return f"{server} answered {len(logprobs)} logprobs for the {self._expected.size} that it was asked for"
        differences = np.array(logprobs) - self._expected
        largest = float(np.max(np.abs(differences)))
        said = (
            f"{server} computes other logprobs than the learner after the push: they differ by up to {largest:.2g} nats"
        )
        if not largest <= self._tolerance:  # a NaN is no match either
            return f"{said}, more than {self._tolerance:g}. Set weights.probe_tolerance if the precision explains it"
        if (part := self._missing_part(differences)) is not None:
            return (
                f"{said}, as if {part:.0%} of what the push changed were missing: some weights are of another version"
            )
        self._readings.append(_rms(differences[_most(differences)]))
        return None

    def _missing_part(self, differences: NDArray[np.float64]) -> float | None:
        """Return which part of the push's change these differences undo; negative: repeat. None: nothing can be said.

        Weights that were left behind differ along the change, far below the tolerance; noise does so by chance only.
        """
        noise = max(_LEAST_NOISE * self._tolerance, *self._readings, 0.0)
        if not self._change.size or _rms(self._change[_most(self._change)]) < _LEAST_CHANGE * noise:
            return None
        least = max(_LEAST_PART, _DEVIATIONS * noise / float(np.linalg.norm(self._change)))
        part = _undone(differences, self._change)
        most = _most(differences * self._change)
        of_most = _undone(differences[most], self._change[most])
        return part if abs(part) > least and abs(of_most) > least / 2 else None


def _undone(differences: NDArray[np.float64], change: NDArray[np.float64]) -> float:
    """Return which part of a change these differences take back; 0 where nothing changed."""
    return -float(differences @ change) / (float(change @ change) or 1.0)


def _most(values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return where all but the few largest of these are."""
    return np.argsort(np.abs(values))[: values.size - math.ceil(_FEW * values.size)]


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _drawn(vocab_size: int, seed: int, num_tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, num_tokens)]
