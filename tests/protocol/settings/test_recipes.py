"""What a recipe brings, and what overrides it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.errors import SettingsError
from protocol.settings.learner import RECIPES, LearnerSettings, bundle_of
from protocol.settings.loader import describe_settings, load_settings, save_settings
from protocol.settings.settings import Settings


def of(**sections: Any) -> Settings:
    return Settings.model_validate(sections)


def value_of(settings: Settings, section: str, name: str) -> Any:
    return getattr(getattr(settings, section), name)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_recipe_sets_all_that_its_bundle_names_and_leaves_the_rest(recipe: str) -> None:
    found, plain = of(learner={"recipe": recipe}), of()
    for section, bundle in bundle_of({"recipe": recipe}).items():
        for name, value in bundle.items():
            assert value_of(found, section, name) == value, f"{section}.{name}"
    shown = {name for name, _, is_changed in describe_settings(found) if is_changed}
    named = {f"{section}.{name}" for section, bundle in bundle_of({"recipe": recipe}).items() for name in bundle}
    assert shown <= named | {"learner.recipe"}
    assert plain == Settings()


def test_no_recipe_is_the_recipe_grpo() -> None:
    found = of()
    learner, aggregate = found.learner, found.loss.aggregate
    assert (learner.recipe, learner.advantage, learner.loss, learner.correction) == ("grpo", "grpo", "ppo", "tis")
    assert (learner.clip_low, learner.clip_high, aggregate, found.kl.coefficient) == (0.2, 0.2, "token_mean", 0.0)


def test_a_setting_overrides_its_part_of_the_recipe_and_no_more() -> None:
    found = of(learner={"recipe": "dapo", "clip_high": 0.3}, loss={"aggregate": "seq_mean_token_sum"})
    assert (found.learner.clip_low, found.learner.clip_high, found.learner.dual_clip) == (0.2, 0.3, 10.0)
    assert found.loss.aggregate == "seq_mean_token_sum"


def test_null_is_the_recipes_advantage_but_nothing_elsewhere() -> None:
    found = of(learner={"recipe": "ppo", "advantage": None}, rewards={"clip": None})
    assert found.learner.advantage == "gae"
    assert found.rewards.clip is None


def test_sections_may_be_given_as_records() -> None:
    found = Settings(learner=LearnerSettings(recipe="gspo", clip_low=1e-3))
    assert (found.learner.loss, found.learner.clip_low, found.learner.clip_high) == ("gspo", 1e-3, 4e-4)
    assert found.loss.aggregate == "seq_mean_token_mean"


def test_command_line_overrides_the_recipe_of_a_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learner: {recipe: dapo, lr: 1.0e-5}\nloss: {aggregate: seq_mean_token_mean}\n")
    found = load_settings(config, ["--learner.clip_high", "0.25"])
    assert (found.learner.clip_high, found.learner.lr, found.loss.aggregate) == (0.25, 1e-5, "seq_mean_token_mean")
    other = load_settings(config, ["--learner.recipe", "dr_grpo"])
    assert (other.learner.advantage, other.learner.clip_high) == ("dr_grpo", 0.2)


def test_given_settings_are_saved_without_the_recipes_and_take_another_recipe(tmp_path: Path) -> None:
    saved = of(learner={"recipe": "dapo", "lr": "2e-5", "clip_low": 0.1, "loss": None}, rewards={"clip": None})
    save_settings(saved, tmp_path / "settings.yaml")
    assert load_settings(tmp_path / "settings.yaml", []) == saved
    assert yaml.safe_load((tmp_path / "given.yaml").read_text()) == {
        "learner": {"recipe": "dapo", "lr": 2e-5, "clip_low": 0.1},
        "rewards": {"clip": None},
    }
    other = load_settings(tmp_path / "given.yaml", ["--learner.recipe", "gspo"])
    assert other == of(learner={"recipe": "gspo", "lr": 2e-5, "clip_low": 0.1}, rewards={"clip": None})


def test_given_settings_have_absolute_paths(tmp_path: Path) -> None:
    given = load_settings(None, ["--data.train", "rows.jsonl"], tmp_path).given_settings()
    assert given == {"data": {"train": f"{tmp_path}/rows.jsonl"}}


def test_another_recipe_over_resolved_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    save_settings(of(), path)
    with pytest.raises(SettingsError) as caught:
        load_settings(path, ["--learner.recipe", "cispo"])
    assert str(caught.value) == (
        f"settings: learner.recipe = cispo has no effect: {path} has every setting, with recipe grpo's values. Give "
        "the file of the given settings in the same folder, given.yaml."
    )
    assert load_settings(path, ["--learner.recipe", "grpo"]) == of()


@pytest.mark.parametrize(
    ("learner", "section", "name", "value"),
    [
        ({"loss": "gspo"}, "learner", "clip_high", 4e-4),
        ({"loss": "gspo"}, "loss", "aggregate", "seq_mean_token_mean"),
        ({"loss": "gspo"}, "policy", "old_logprobs", "recompute"),
        ({"loss": "gspo", "clip_high": 0.01}, "learner", "clip_high", 0.01),
        ({"recipe": "dapo", "loss": "cispo"}, "learner", "clip_high", 4.0),
        ({"loss": "cispo"}, "learner", "correction", "none"),
        ({"loss": "cispo", "correction": "tis"}, "learner", "correction", "tis"),
        ({"advantage": "dr_grpo"}, "loss", "aggregate", "seq_sum_norm"),
        ({"recipe": "gspo", "loss": "ppo"}, "learner", "clip_high", 0.2),
    ],
)
def test_loss_or_advantage_brings_what_its_paper_needs(
    learner: dict[str, Any], section: str, name: str, value: object
) -> None:
    assert value_of(of(learner=learner), section, name) == value


@pytest.mark.parametrize("recipe", ["grpa", 3, None, ["grpo"]])
def test_unknown_recipe_is_refused_as_such(recipe: object) -> None:
    with pytest.raises(ValueError, match=r"learner\.recipe\n  Input should be 'grpo', 'dapo'"):
        of(learner={"recipe": recipe})


@pytest.mark.parametrize("learner", [None, 7, "grpo", ["recipe"]])
def test_section_that_is_no_mapping_is_refused_as_such(learner: object) -> None:
    with pytest.raises(ValueError, match="learner\n  Input should be a valid dictionary or instance of"):
        of(learner=learner)
