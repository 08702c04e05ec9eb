"""The held-out sets of a run: which prompts, how many samples of each, at which temperature."""

from collections.abc import Sequence
from dataclasses import dataclass

from learner.data.prompts import Prompt
from protocol.settings.evaluation import MAIN_SET


@dataclass(frozen=True)
class HeldOutSet:
    """Prompts that are scored and never trained."""

    prompts: Sequence[Prompt]  # each is sampled num_samples times, and once more without randomness
    num_samples: int  # of each prompt at the temperature
    name: str = MAIN_SET  # part of its metrics: eval/NAME/reward
    temperature: float | None = None  # of its samples; None: rollout.temperature
