"""Running mean and deviation of a run's rewards, and rewards normalised by them."""

import math
from dataclasses import dataclass

from torch import Tensor

_EPSILON = 1e-8


@dataclass(frozen=True)
class RunningMoments:
    """Three numbers, for the checkpoint."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def after(self, rewards: Tensor) -> "RunningMoments":
        """Return the moments with these rewards [N] added. Source: Chan, Golub, LeVeque (1979), eq. 2.1."""
        if not len(rewards):
            return self
        new, mean = float(len(rewards)), float(rewards.mean())
        count, difference = self.count + new, mean - self.mean
        squares = float((rewards - mean).square().sum())
        return RunningMoments(
            count=count,
            mean=self.mean + difference * new / count,
            squares=self.squares + squares + difference**2 * self.count * new / count,
        )

    def normalise(self, rewards: Tensor) -> Tensor:
        """Return (rewards [N] - mean) / (unbiased deviation + 1e-8)."""
        deviation = math.sqrt(self.squares / max(1.0, self.count - 1.0))
        return (rewards - self.mean) / (deviation + _EPSILON)
