"""Settings held against the model's own description, before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from learner.checkpoint.manifest import Checkpoint
from learner.run.checks.preflight import check_logit_bias, notice_changes, resolve_settings
from learner.run.start import RunStart
from protocol.errors import SettingsError
from protocol.settings.loader import save_settings
from protocol.settings.settings import Settings


def model_of(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def biased(*tokens: int) -> Settings:
    return Settings.model_validate({"sampling": {"logit_bias": dict.fromkeys(tokens, -1.0), "only_eval": True}})


def test_bias_of_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, vocab_size=272)
    check_logit_bias(model, biased(0, 271))
    with pytest.raises(SettingsError) as refused:
        check_logit_bias(model, biased(5, 272))
    assert str(refused.value) == (
        "settings: sampling.logit_bias names token 272, and policy.model has 272 tokens, 0 to 271. Leave it out, or "
        "give the token's id in this model."
    )


def test_any_bias_passes_where_the_model_does_not_tell_its_tokens(tmp_path: Path) -> None:
    check_logit_bias(model_of(tmp_path), biased(1 << 20))


def test_resume_names_the_settings_that_differ_from_the_last_start(tmp_path: Path) -> None:
    before = Settings.model_validate({"learner": {"lr": 0.003}, "run": {"name": "a"}})
    save_settings(before, tmp_path / "settings.yaml")
    start = RunStart(tmp_path, Checkpoint(tmp_path, 4, 4, "a", ""))
    now = Settings.model_validate({"learner": {"lr": 0.001}, "run": {"name": "a", "resume": str(tmp_path)}})
    assert notice_changes(now, start) == "Changed since the last start: learner.lr 0.003 -> 0.001."
    assert notice_changes(before, start) is None
    assert notice_changes(now, RunStart(tmp_path, None)) is None


@pytest.mark.parametrize(
    ("positions", "given", "tokens"), [(1024, {}, 1024), (32768, {}, 4096), (1024, {"max_context_tokens": 4096}, 4096)]
)
def test_context_that_nobody_gave_is_at_most_what_the_model_has(
    tmp_path: Path, positions: int, given: dict[str, int], tokens: int
) -> None:
    model = model_of(tmp_path, max_position_embeddings=positions)
    for name in ("tokenizer.json", "pytorch_model.bin"):
        (model / name).touch()
    settings = Settings.model_validate({"policy": {"model": str(model)}, "rollout": given})
    assert resolve_settings(settings).rollout.max_context_tokens == tokens
