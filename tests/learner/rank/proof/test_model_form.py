"""A checkpoint is proven by the settings that it was saved with."""

from learner.rank.proof.model_form import as_saved, made_with
from protocol.settings.settings import Settings


def test_settings_of_the_models_form_are_those_that_were_told_and_others_those_of_now() -> None:
    saved = Settings.model_validate(
        {"policy": {"model": "m", "dtype": "bfloat16", "lora": {"rank": 4}}, "critic": {"model": "c"}}
    )
    now = Settings.model_validate({"policy": {"model": "m", "dtype": "float32"}, "learner": {"lr": 0.5}})
    found = as_saved(now, made_with(saved))
    assert found.policy == saved.policy
    assert found.critic.model == "c"
    assert found.learner.lr == 0.5


def test_a_checkpoint_that_told_no_settings_is_proven_by_those_of_now() -> None:
    now = Settings.model_validate({"policy": {"dtype": "float32"}})
    assert as_saved(now, {}) is now
