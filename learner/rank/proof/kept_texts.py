"""The kept batch of a checkpoint: a few short texts, drawn anew for each step, and what the models say of them.

Every text has a forward pass of its own, so that a model that mixes packed trajectories is no exception.
"""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch

_NUM_TEXTS = 3
_NUM_TOKENS = 20

# A rank and the proof compute with the same weights by other kernels, a GPU's and a CPU's for one. Rounding moves the
# mean of 57 logprobs by less than this many nats.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def draw_texts(vocab_size: int, seed: int, step: int) -> list[list[int]]:
    """Return the texts of a step's checkpoint as token ids; the same on every rank."""
    draw = np.random.default_rng([seed, step])
    return [[int(token) for token in draw.integers(0, vocab_size, _NUM_TOKENS)] for _ in range(_NUM_TEXTS)]


def answers(say: Callable[[MicroBatch], Tensor], texts: Sequence[Sequence[int]]) -> list[float]:
    """Return what a model says at each token but a text's first.

    say: micro-batch -> [K], without a gradient; collective where it is.
    """
    found: list[float] = []
    for text in texts:
        is_written = np.ones(len(text), np.bool_)
        is_written[0] = False
        sample = LearnerSample(np.array(text, np.int32), is_written, np.zeros(len(text), np.float32))
        found += [float(number) for number in say(make_micro_batch([sample])).tolist()]
    return found
