"""The one table of names: settings accept exactly what is in it, and recipes name what is in it."""

import inspect
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import get_args

import pytest

from learner.algorithms import advantages, corrections, losses
from learner.algorithms.by_name import ADVANTAGES, CORRECTIONS, LOSSES, RECIPES, algorithm_of
from protocol.settings.learner import LearnerSettings

TABLES = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS, "recipe": RECIPES}


@pytest.mark.parametrize("setting", sorted(TABLES))
def test_settings_accept_the_names_of_the_table_and_no_others(setting: str) -> None:
    annotation = LearnerSettings.model_fields[setting].annotation
    names = {name for part in (annotation, *get_args(annotation)) for name in get_args(part) if isinstance(name, str)}
    assert names == set(TABLES[setting])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipe_is_what_it_names_until_a_setting_says_otherwise(name: str) -> None:
    found, recipe = algorithm_of(LearnerSettings(recipe=name)), RECIPES[name]  # type: ignore[arg-type]
    assert found.advantage is ADVANTAGES[recipe.advantage]
    assert found.loss is LOSSES[recipe.loss]
    assert found.correction is CORRECTIONS[recipe.correction]
    other = algorithm_of(LearnerSettings(recipe=name, advantage="rloo", loss="reinforce", correction="none"))  # type: ignore[arg-type]
    assert other.advantage is ADVANTAGES["rloo"]
    assert other.loss is LOSSES["reinforce"]
    assert other.correction is CORRECTIONS["none"]


@pytest.mark.parametrize(
    ("room", "table"),
    [(advantages, ADVANTAGES), (losses, LOSSES), (corrections, CORRECTIONS)],
    ids=["advantages", "losses", "corrections"],
)
def test_every_algorithm_file_is_in_the_table(room: ModuleType, table: dict[str, object]) -> None:
    """A file that defines an algorithm and is in no table would be unreachable."""
    functions = [
        getattr(entry, "of_tokens", None) or getattr(entry, "of_groups", None) or getattr(entry, "kept", entry)
        for entry in table.values()
    ]
    modules = [import_module(f"{room.__name__}.{found.name}") for found in pkgutil.iter_modules(room.__path__)]
    shared = {"advantage", "of_groups", "policy_loss", "value_loss", "band", "token_weights"}
    found = {module for module in modules if module.__name__.rpartition(".")[2] not in shared}
    assert found == {inspect.getmodule(function) for function in functions}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("grpo", ("grpo", "ppo", "tis")),
        ("dr_grpo", ("dr_grpo", "ppo", "tis")),
        ("rloo", ("rloo", "reinforce", "tis")),
    ],
)
def test_recipe_pairs_an_advantage_with_a_loss_and_a_correction(name: str, parts: tuple[str, str, str]) -> None:
    recipe = RECIPES[name]
    assert (recipe.advantage, recipe.loss, recipe.correction) == parts
