"""Recipes: an advantage, a loss and a correction that belong together, by name.

Read by the ranks. A setting of its own (learner.advantage, learner.loss, learner.correction) wins over the recipe's.
"""

from dataclasses import dataclass

from protocol.settings.learner import LearnerSettings


@dataclass(frozen=True)
class Recipe:
    advantage: str
    loss: str
    correction: str


RECIPES = {
    "grpo": Recipe(advantage="grpo", loss="ppo", correction="tis"),
    "dr_grpo": Recipe(advantage="dr_grpo", loss="ppo", correction="tis"),
    "rloo": Recipe(advantage="rloo", loss="reinforce", correction="tis"),
}


def recipe_of(settings: LearnerSettings) -> Recipe:
    """Return what the settings ask for, after the recipe's defaults."""
    recipe = RECIPES[settings.recipe]
    return Recipe(
        advantage=settings.advantage or recipe.advantage,
        loss=settings.loss or recipe.loss,
        correction=settings.correction or recipe.correction,
    )
