"""What was sampled, and is trained on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.world import own_device


@dataclass(frozen=True)
class Answer:
    """One sampled trajectory."""

    tokens: NDArray[np.int32]  # [T]
    mask: NDArray[np.bool_]  # [T], true where the model wrote the token
    reward: float  # of the whole answer
    # [T], logprobs of who sampled it, 0 where the mask is false; None: Sluice's side computes its own
    behaviour: NDArray[np.float32] | None = None

    def batch(self) -> MicroBatch:
        """Return it as one forward pass takes it, on the device of this process."""
        sample = LearnerSample(self.tokens, self.mask, np.zeros(len(self.tokens), np.float32))
        return make_micro_batch([sample]).to(own_device())
