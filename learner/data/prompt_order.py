"""The order in which prompts are leased: every epoch a seeded permutation, the same after a restart.

Only a position has to be remembered: position = epoch * num_prompts + place in the epoch.
"""

from functools import lru_cache

import numpy as np


class PromptOrder:
    """Example:
    >>> order = PromptOrder(num_prompts=3, seed=1)
    >>> [order.at(position) for position in range(4)]
    [(0, 0), (0, 1), (0, 2), (1, 2)]
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        self._num_prompts = num_prompts
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(num_prompts)
        )

    def at(self, position: int) -> tuple[int, int]:
        """Return (epoch, index of the prompt) at a position counted from the start of the run."""
        epoch, place = divmod(position, self._num_prompts)
        return epoch, int(self._permutation(epoch)[place])
