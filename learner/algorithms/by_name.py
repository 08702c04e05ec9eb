"""Every advantage, loss, correction and recipe by the name that settings give it.

A new one is a file, a line here, and its name in `protocol.settings.learner`; a test compares the two lists.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from learner.algorithms.advantages.dr_grpo import dr_grpo_advantages
from learner.algorithms.advantages.grpo import grpo_advantages
from learner.algorithms.advantages.rloo import rloo_advantages
from learner.algorithms.corrections.icepop import keep_in_band
from learner.algorithms.corrections.none import keep_all
from learner.algorithms.corrections.token_weights import Correction
from learner.algorithms.corrections.truncated import keep_truncated
from learner.algorithms.losses.policy_loss import PolicyLoss
from learner.algorithms.losses.ppo import ppo_loss
from learner.algorithms.losses.reinforce import reinforce_loss
from protocol.settings.learner import LearnerSettings


@dataclass(frozen=True)
class Recipe:
    """An advantage, a loss and a correction that belong together."""

    advantage: str  # name in ADVANTAGES
    loss: str  # name in LOSSES
    correction: str  # name in CORRECTIONS


# Rewards [P, G] of P prompts with G samples each -> advantages [P, G].
ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}

LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo_loss, has_ratio=True),
    "reinforce": PolicyLoss(reinforce_loss, has_ratio=False),
}

CORRECTIONS: dict[str, Correction] = {
    "none": Correction(keep_all, is_weighted=False),
    "tis": Correction(keep_truncated, is_weighted=True),
    "icepop": Correction(keep_in_band, is_weighted=True),
}

RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(advantage="grpo", loss="ppo", correction="tis"),
    "dr_grpo": Recipe(advantage="dr_grpo", loss="ppo", correction="tis"),
    "rloo": Recipe(advantage="rloo", loss="reinforce", correction="tis"),
}


def recipe_of(settings: LearnerSettings) -> Recipe:
    """Return what the settings ask for: their recipe, and what they name besides it."""
    recipe = RECIPES[settings.recipe]
    return Recipe(
        advantage=settings.advantage or recipe.advantage,
        loss=settings.loss or recipe.loss,
        correction=settings.correction or recipe.correction,
    )
