"""Every advantage, loss and correction by the name that settings give it, and what a run's settings ask for together.

A new one is a file, a line here, and its name in `protocol.settings.learner`; a test compares the two lists.
"""

from dataclasses import dataclass

from learner.algorithms.advantages.advantage import Advantage
from learner.algorithms.advantages.dr_grpo import dr_grpo_advantages
from learner.algorithms.advantages.grpo import grpo_advantages
from learner.algorithms.advantages.rloo import rloo_advantages
from learner.algorithms.corrections.band import Band
from learner.algorithms.corrections.icepop import keep_in_band
from learner.algorithms.corrections.none import keep_all
from learner.algorithms.corrections.token_weights import Correction
from learner.algorithms.corrections.truncated import keep_truncated
from learner.algorithms.losses.policy_loss import Clip, PolicyLoss
from learner.algorithms.losses.ppo import ppo_loss
from learner.algorithms.losses.reinforce import reinforce_loss
from protocol.settings.learner import LearnerSettings


@dataclass(frozen=True)
class Recipe:
    """An advantage, a loss and a correction that belong together."""

    advantage: str  # name in ADVANTAGES
    loss: str  # name in LOSSES
    correction: str  # name in CORRECTIONS


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(of_groups=grpo_advantages, min_group=2),
    "dr_grpo": Advantage(of_groups=dr_grpo_advantages, min_group=2),
    "rloo": Advantage(of_groups=rloo_advantages, min_group=2),
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


@dataclass(frozen=True)
class Algorithm:
    """What a run's settings ask for."""

    advantage: Advantage  # how much better a sample or token was than expected
    loss: PolicyLoss  # what a token contributes to the gradient
    correction: Correction  # what makes samples of the behaviour policy count as samples of the learner
    clip: Clip  # of the loss
    band: Band  # of the correction


def algorithm_of(settings: LearnerSettings) -> Algorithm:
    """Return what the settings ask for: their recipe, and what they name besides it."""
    recipe = RECIPES[settings.recipe]
    return Algorithm(
        advantage=ADVANTAGES[settings.advantage or recipe.advantage],
        loss=LOSSES[settings.loss or recipe.loss],
        correction=CORRECTIONS[settings.correction or recipe.correction],
        clip=Clip(settings.clip_low, settings.clip_high, settings.dual_clip),
        band=Band(settings.correction_low, settings.correction_high),
    )
