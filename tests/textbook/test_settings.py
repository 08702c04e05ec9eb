"""What may be said of a comparison: settings that the plain loop knows, and no other."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.loader import describe_settings
from protocol.settings.settings import Settings
from tests.textbook.settings import KNOWN, comparison_settings


def test_settings_that_are_given_stand_over_the_usual_ones() -> None:
    options = ["--learner.lr", "1e-5", "--run.max_steps=7", "--learner.recipe", "dapo", "--learner.betas", "[0.8, 0.9]"]
    settings = comparison_settings("m", "p.jsonl", options)
    assert (settings.policy.model, settings.data.train) == ("m", str(Path("p.jsonl").absolute()))
    assert (settings.learner.lr, settings.run.max_steps, settings.learner.betas) == (1e-5, 7, (0.8, 0.9))
    assert (settings.learner.clip_high, settings.filter.dynamic_sampling) == (0.28, True)
    assert (settings.learner.max_staleness, settings.policy.dtype) == (0, "float32")


@pytest.mark.parametrize(("option", "value"), [("learner.loss", "gspo"), ("policy.dtype", "bfloat16"), ("lr", "1")])
def test_setting_that_the_plain_loop_does_not_know_is_refused_by_name(option: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"^settings: {option} is not known to the plain loop.*learner\.lr"):
        comparison_settings("m", "p", [f"--{option}", value])


def test_recipe_without_a_plain_loop_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^settings: learner\.recipe = gspo has no plain loop\. Set it to grpo, "):
        comparison_settings("m", "p", ["--learner.recipe", "gspo"])


def test_groups_that_do_not_make_equal_mini_batches_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"learner\.groups_per_step = 4 cannot be cut into 3 equal mini-batches"):
        comparison_settings("m", "p", ["--learner.num_mini_batches", "3"])


def test_every_known_setting_is_one() -> None:
    assert set(KNOWN) <= {name for name, _, _ in describe_settings(Settings())}


def test_learning_rate_0_is_a_setting_and_a_lower_one_is_not() -> None:
    assert comparison_settings("m", "p", ["--learner.lr", "0"]).learner.lr == 0.0
    with pytest.raises(SettingsError, match=r"learner\.lr = .-1. is wrong: Input should be greater than or equal to 0"):
        comparison_settings("m", "p", ["--learner.lr", "-1"])
