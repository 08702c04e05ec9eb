"""What every advantage is: a function of a group's rewards, or of one trajectory's tokens.

Shapes: P prompts, G samples of each, K model tokens of one trajectory in order.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# (rewards [P, G] float64, model tokens of each sample [P, G] float64) -> advantages [P, G], each of all its tokens
OfGroups = Callable[[Tensor, Tensor], Tensor]

# (rewards [K] float64, values [K] float64 or None, gamma, lambda) -> advantages [K]. Tokens that the model did not
# write are not in it: the values and sums of those around them meet.
OfTokens = Callable[[Tensor, Tensor | None, float, float], Tensor]


@dataclass(frozen=True)
class Advantage:
    """An advantage that settings can name: exactly one of the two functions."""

    of_groups: OfGroups | None = None  # of a whole sample, from its group's rewards
    of_tokens: OfTokens | None = None  # of each token, from its own trajectory's rewards
    needs_critic: bool = False  # of_tokens is given values
    is_whitened: bool = False  # the step's advantages are then brought to mean 0 and deviation 1 over all model tokens
    min_group: int = 1  # samples of a prompt that it needs

    def __post_init__(self) -> None:
        if (self.of_groups is None) == (self.of_tokens is None):
            raise ValueError("an advantage has either of_groups or of_tokens")
