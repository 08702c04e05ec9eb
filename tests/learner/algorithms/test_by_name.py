"""The one table of names: settings accept exactly what is in it, and know of each what they say of it."""

import inspect
import math
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any, get_args

import pytest

from learner.algorithms import advantages, importance, losses
from learner.algorithms.aggregate import AGGREGATES
from learner.algorithms.by_name import ADVANTAGES, CORRECTIONS, LOSSES, algorithm_of
from learner.algorithms.kl import KL_FORMS
from protocol.settings import learner as names
from protocol.settings.learner import RECIPES, KlSettings, LearnerSettings, LossSettings
from protocol.settings.settings import Settings

NOT_IN_A_TABLE = {
    *("advantage", "discounted"),
    *("policy_loss", "value_loss"),
}


def test_settings_accept_the_names_of_the_tables_and_no_others() -> None:
    of_groups, of_tokens = names.ADVANTAGES_OF_GROUPS, names.ADVANTAGES_OF_TOKENS
    assert {*of_groups, *of_tokens} == set(ADVANTAGES)
    assert {name for name, each in ADVANTAGES.items() if each.of_groups} == set(of_groups)
    assert {name: each.needs_critic for name, each in ADVANTAGES.items() if each.of_tokens} == of_tokens
    assert set(names.LOSSES) == set(LOSSES)
    assert {name for name, each in LOSSES.items() if not each.has_ratio} == {"reinforce"}
    assert set(names.CORRECTIONS) == set(CORRECTIONS)
    assert set(get_args(LossSettings.model_fields["aggregate"].annotation)) == set(AGGREGATES)
    assert set(get_args(KlSettings.model_fields["form"].annotation)) == set(KL_FORMS)
    assert set(get_args(LearnerSettings.model_fields["recipe"].annotation)) == set(RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipe_is_what_it_names_until_a_setting_says_otherwise(name: str) -> None:
    bundle = RECIPES[name]["learner"]
    for settings in (LearnerSettings(recipe=name), Settings.model_validate({"learner": {"recipe": name}}).learner):  # type: ignore[arg-type]
        found = algorithm_of(settings)
        assert found.advantage is ADVANTAGES[bundle["advantage"]]
        assert found.loss is LOSSES[bundle["loss"]]
        assert found.correction is CORRECTIONS[bundle["correction"]]
    other = algorithm_of(LearnerSettings(recipe=name, advantage="rloo", loss="reinforce", correction="none"))  # type: ignore[arg-type]
    assert other.advantage is ADVANTAGES["rloo"]
    assert other.loss is LOSSES["reinforce"]
    assert other.correction is CORRECTIONS["none"]


@pytest.mark.parametrize(
    ("settings", "band"),
    [
        ({"correction": "tis"}, (0.5, 2.0)),
        ({"correction": "geo_mask"}, (0.99, 1.01)),
        ({"correction": "geo_mask", "correction_high": 1.1}, (0.99, 1.1)),
        ({"correction": "icepop", "correction_low": 0.7, "correction_high": 1.4}, (0.7, 1.4)),
    ],
)
def test_each_correction_has_its_own_band_until_a_setting_says_otherwise(
    settings: dict[str, Any], band: tuple[float, float]
) -> None:
    found = algorithm_of(LearnerSettings(**settings)).band
    assert (found.low, found.high) == band


def test_other_settings_reach_the_algorithm() -> None:
    given = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": None, "gamma": 0.9, "gae_lambda": 0.8, "whiten": True}
    found = algorithm_of(LearnerSettings(**given))  # type: ignore[arg-type]
    assert (found.clip.low, found.clip.high, found.clip.dual) == (0.1, 0.3, math.inf)
    assert (found.gamma, found.lam, found.is_whitened) == (0.9, 0.8, True)
    assert algorithm_of(LearnerSettings(advantage="gae")).is_whitened
    assert not algorithm_of(LearnerSettings(advantage="gae", whiten=False)).is_whitened


@pytest.mark.parametrize(
    ("room", "table"),
    [(advantages, ADVANTAGES), (losses, LOSSES)],
    ids=["advantages", "losses"],
)
def test_every_algorithm_file_is_in_the_table(room: ModuleType, table: dict[str, object]) -> None:
    """A file that defines an algorithm and is in no table would be unreachable."""
    functions = [getattr(entry, "of_tokens", None) or getattr(entry, "of_groups", entry) for entry in table.values()]
    modules = [import_module(f"{room.__name__}.{found.name}") for found in pkgutil.iter_modules(room.__path__)]
    found = {module for module in modules if module.__name__.rpartition(".")[2] not in NOT_IN_A_TABLE}
    assert found == {inspect.getmodule(function) for function in functions}


def test_every_correction_is_in_the_table() -> None:
    functions = {function for name, function in vars(importance).items() if name.startswith("keep_")}
    assert functions == {each.kept for each in CORRECTIONS.values()}
