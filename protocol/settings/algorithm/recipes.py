"""Recipes: bundles of settings that belong together, laid under what the user says.

`learner.recipe` names one; a setting given in the file or on the command line overrides its part of it.
"""

from collections.abc import Mapping
from typing import Any

from protocol.settings.section import Section

# Recipe -> section -> setting -> value. What a recipe does not name has its own default.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv:2402.03300, with DAPO's mean over tokens and without its KL, which needs a reference model.
    "grpo": {"learner": {"advantage": "grpo", "loss": "ppo", "correction": "tis"}},
    # arXiv:2503.14476: clip-higher, mean over tokens, groups of no signal replaced (filter.low and high are for
    # scores from 0 to 1). Its penalty of overlong answers depends on their budget: rewards.overlong_buffer_tokens.
    "dapo": {
        "learner": {
            "advantage": "grpo",
            "loss": "ppo",
            "correction": "tis",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 10.0,
        },
        "filter": {"dynamic_sampling": True},
    },
    # arXiv:2503.20783: neither a group's deviation nor an answer's length divides anything.
    "dr_grpo": {
        "learner": {"advantage": "dr_grpo", "loss": "ppo", "correction": "tis"},
        "loss": {"aggregate": "seq_sum_norm"},
    },
    # arXiv:2402.14740
    "rloo": {"learner": {"advantage": "rloo", "loss": "reinforce", "correction": "tis"}},
    # arXiv:2501.03262: returns less the KL, whitened over the step.
    "reinforce_pp": {
        "learner": {"advantage": "reinforce_pp", "loss": "ppo", "correction": "tis"},
        "kl": {"coefficient": 0.001, "place": "reward", "form": "k1"},
    },
    # arXiv:1707.06347 with arXiv:1909.08593's KL in the reward; the critic's settings are its own section's.
    "ppo": {
        "learner": {"advantage": "gae", "loss": "ppo", "correction": "tis"},
        "kl": {"coefficient": 0.001, "place": "reward", "form": "k1"},
        "rewards": {"clip": 10.0},
    },
    # arXiv:2507.18071: clipped by the answer, so that its clip is a thousandth of PPO's.
    "gspo": {
        "learner": {"advantage": "grpo", "loss": "gspo", "correction": "tis", "clip_low": 3e-4, "clip_high": 4e-4},
        "loss": {"aggregate": "seq_mean_token_mean"},
    },
    # arXiv:2506.13585: the loss is itself an importance weight that is cut, here at 5: no second one is needed.
    "cispo": {"learner": {"advantage": "grpo", "loss": "cispo", "correction": "none", "clip_high": 4.0}},
}

DEFAULT_RECIPE = "grpo"
# Their null means: the recipe's.
_NULL_IS_RECIPES = ("advantage", "loss", "correction")


def over_recipe(given: Any) -> Any:
    """Return the settings with those of their recipe below them. What is no mapping, and an unknown recipe, is left."""
    if not isinstance(given, Mapping):
        return given
    learner = _as_given(given.get("learner", {}))
    recipe = learner.get("recipe", DEFAULT_RECIPE) if isinstance(learner, Mapping) else None
    if not isinstance(recipe, str) or recipe not in RECIPES:
        return given
    laid = dict(given)
    for section, bundle in RECIPES[recipe].items():
        own = _as_given(laid.get(section, {}))
        if not isinstance(own, Mapping):
            continue  # a section that is no mapping is refused where it is checked
        is_silent = {name for name in _NULL_IS_RECIPES if section == "learner" and own.get(name) is None}
        laid[section] = bundle | {name: value for name, value in own.items() if name not in is_silent}
    return laid


def names_of_recipes() -> dict[str, set[str]]:
    """Return section -> the settings that some recipe names."""
    found: dict[str, set[str]] = {}
    for bundles in RECIPES.values():
        for section, bundle in bundles.items():
            found.setdefault(section, set()).update(bundle)
    return found


def _as_given(section: Any) -> Any:
    return section.model_dump(exclude_unset=True) if isinstance(section, Section) else section
