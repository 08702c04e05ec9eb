"""Settings held against the model's own description, before anything starts."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from learner.checkpoint.manifest import Checkpoint
from learner.data.prompt_reading import read_prompts
from learner.ledger.ledger import Ledger, terms_of
from learner.run.checks.preflight import (
    check_engine_args,
    check_logit_bias,
    check_other_positions,
    check_same_batch,
    check_same_files,
    check_same_objective,
    notice_changes,
    notice_kept_answers,
    notice_mixture,
    notice_passes,
    notice_small_epoch,
    resolve_context,
)
from learner.run.checks.prompt_checks import TrainPrompts
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


def test_step_of_several_epochs_is_reported() -> None:
    of_200 = Settings.model_validate({"learner": {"groups_per_step": 200}, "run": {"max_steps": 3}})
    assert notice_small_epoch(of_200, 200) is None
    assert "more than the 50 rows of data.train: a step takes 4 epochs." in str(notice_small_epoch(of_200, 50))


def test_epochs_beside_what_replaces_prompts_say_that_the_passes_may_be_more() -> None:
    def notice(epochs: float | None, **sections: object) -> str | None:
        return notice_passes(Settings.model_validate({"run": {"max_epochs": epochs}, **sections}))

    filtered, curriculum = {"filter": {"dynamic_sampling": True}}, {"data": {"curriculum": {"easy": 0.9}}}
    assert [notice(1), notice(None, **filtered), notice(None, **curriculum)] == [None] * 3
    assert "that filter.dynamic_sampling leaves out, so the passes" in str(notice(1, **filtered))
    assert "that data.curriculum leaves out, so the passes" in str(notice(1, **curriculum))
    assert "progress/epoch in the metrics" in str(notice(1.5, **filtered, **curriculum))


def test_mixture_says_how_many_rows_it_takes_of_each_entry_and_how_often(tmp_path: Path) -> None:
    for name, num_rows in (("small", 3), ("large", 100)):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "p", "label": "l"}\n' * num_rows)
    entries = [
        {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in (("small", 1), ("large", 3))
    ]
    given = {"data": {"train": entries}, "learner": {"groups_per_step": 4}, "run": {"max_steps": 10}}
    settings = Settings.model_validate(given)
    index, _ = read_prompts(settings.data.train, settings.data)
    train = TrainPrompts(index, (), None, 0)
    assert notice_mixture(settings, train) == (
        "By the weights of data.train, the run takes 40 rows: about 10 from the 3 of "
        f"{tmp_path}/small.jsonl, each 3.3 times; about 30 from the 100 of {tmp_path}/large.jsonl."
    )
    plain = Settings.model_validate(given | {"data": {"train": [entry["path"] for entry in entries]}})
    assert notice_mixture(plain, train) is None


@pytest.mark.parametrize("section", ["critic", "reference"])
def test_other_model_with_fewer_positions_than_a_text_is_refused(tmp_path: Path, section: str) -> None:
    model = model_of(tmp_path, max_position_embeddings=1024)
    for name in ("model.safetensors", "tokenizer.json"):
        save_file({}, model / name)
    algorithm = {"recipe": "ppo"} if section == "critic" else {}
    given = {section: {"model": str(model)}, "kl": {"coefficient": 0.1}, "learner": algorithm}
    check_other_positions(Settings.model_validate({**given, "rollout": {"max_context_tokens": 1024}}))
    with pytest.raises(SettingsError) as refused:
        check_other_positions(Settings.model_validate({**given, "rollout": {"max_context_tokens": 1025}}))
    assert str(refused.value) == (
        f"settings: {section}.model = {model} has 1024 positions, and a text may have 1025 tokens "
        "(rollout.max_context_tokens, or the longest row). Lower that, or use a model with more positions."
    )


def test_any_bias_passes_where_the_model_does_not_tell_its_tokens(tmp_path: Path) -> None:
    check_logit_bias(model_of(tmp_path), biased(1 << 20))


def test_resume_names_the_settings_that_differ_from_the_last_start_of_the_checkpoints_run(tmp_path: Path) -> None:
    before = Settings.model_validate({"learner": {"lr": 0.003}, "run": {"name": "a"}})
    now = Settings.model_validate({"learner": {"lr": 0.001}, "run": {"name": "b", "resume": str(tmp_path)}})
    start = RunStart(tmp_path / "b", Checkpoint(tmp_path / "a" / "checkpoints" / "step_4", 4, 4, "a", ""))
    assert notice_changes(now, start) == (
        f"{tmp_path}/a/settings.yaml is missing: settings that changed since the checkpoint was saved are not listed."
    )
    (tmp_path / "a").mkdir()
    save_settings(before, tmp_path / "a" / "settings.yaml")
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
    settings = Settings.model_validate({"rollout": given})
    assert resolve_context(settings, model).rollout.max_context_tokens == tokens


def test_resume_names_the_changed_settings_that_the_checkpoints_weights_make_useless(tmp_path: Path) -> None:
    start = RunStart(tmp_path, Checkpoint(tmp_path / "checkpoints" / "step_4", 4, 4, "a", ""))
    save_settings(Settings.model_validate({"learner": {"recipe": "ppo"}}), tmp_path / "settings.yaml")
    changed = {"critic": {"model": "b"}, "policy": {"warm_start": {"lr": 1.0}}}
    now = Settings.model_validate({"learner": {"recipe": "ppo"}} | changed)
    notices = [notice_changes(now, start)]
    (tmp_path / "checkpoints" / "step_4" / "state" / "critic").mkdir(parents=True)
    notices.append(notice_changes(now, start))
    assert [str(notice).partition(" No effect")[2] for notice in notices] == [
        " on the checkpoint's weights: policy.warm_start.lr.",
        " on the checkpoint's weights: policy.warm_start.lr, critic.model.",
    ]


@pytest.mark.parametrize("batches", [[], [(1, 2), (3, 4)], [(1, 4), (3, 2), (4, 4)]])
def test_other_batch_of_any_earlier_step_is_refused_where_epochs_count_the_rows(
    tmp_path: Path, batches: list[tuple[int, int]]
) -> None:
    folder = tmp_path / "checkpoints" / "step_4"
    start = RunStart(tmp_path, Checkpoint(folder, 4, 4, "a", ""))
    of = {size: Settings.model_validate({"learner": {"groups_per_step": size}}) for size in (2, 4)}
    save_settings(of[4 if batches else 2], tmp_path / "settings.yaml")
    if batches:  # else a ledger of an old version
        folder.mkdir(parents=True)
        ledger = Ledger(folder / "ledger.sqlite")
        for from_step, size in [*batches, (5, 8)]:  # the last start made no step of the checkpoint
            ledger.begin_terms(from_step, terms_of(Settings.model_validate({"learner": {"groups_per_step": size}})))
        ledger.close()
    with pytest.raises(SettingsError, match=r"learner\.groups_per_step = 4, and earlier steps had 2: run\.max_epochs"):
        check_same_batch(of[4], start)


def test_checkpoint_of_a_run_with_another_objective_is_refused_with_the_model_to_begin_from(tmp_path: Path) -> None:
    start = RunStart(tmp_path / "b", Checkpoint(tmp_path / "a" / "checkpoints" / "step_4", 4, 4, "a", ""))
    (tmp_path / "a").mkdir()
    save_settings(Settings.model_validate({"objective": "sft"}), tmp_path / "a" / "settings.yaml")
    check_same_objective(Settings.model_validate({"objective": "sft"}), start)
    with pytest.raises(
        SettingsError, match=r"= policy_gradient, and .* of a run with sft. .* set policy.model to .*/step_4/model,"
    ):
        check_same_objective(Settings(), start)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.json", "additional_chat_templates/tool_use.jinja"])
@pytest.mark.parametrize("content", ["changed in place", None])
def test_resume_with_another_tokenizer_or_template_is_refused(tmp_path: Path, name: str, content: str | None) -> None:
    start = RunStart(tmp_path, Checkpoint(tmp_path / "step_4", 4, 4, "a", ""))
    for folder in (tmp_path / "model", tmp_path / "step_4" / "model"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("as it was")
    (tmp_path / "model" / "generation_config.json").write_text("of other programs")
    check_same_files(tmp_path / "model", start)
    (tmp_path / "model" / name).unlink()
    if content is not None:
        (tmp_path / "model" / name).write_text(content)
    with pytest.raises(SettingsError, match=f"model/{name} is not the file that .*step_4 was trained with. Put the"):
        check_same_files(tmp_path / "model", start)


@pytest.mark.parametrize(
    ("then", "now", "is_refused"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": [2, 1], "temperature": 0.5}, False),
        ({"eos_token_id": 1}, {"eos_token_id": [1]}, False),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 1}, True),
        ({"eos_token_id": [1, 2]}, {}, True),
        ({"eos_token_id": [1, 2]}, None, True),
        ({"eos_token_id": 7}, None, False),  # vLLM takes config.json's then
    ],
)
def test_resume_with_other_end_tokens_of_generation_is_refused(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any] | None, is_refused: bool
) -> None:
    start = RunStart(tmp_path, Checkpoint(tmp_path / "step_4", 4, 4, "a", ""))
    for folder, given in ((tmp_path / "model", now), (tmp_path / "step_4" / "model", then)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"eos_token_id": 7}')
        if given is not None:
            (folder / "generation_config.json").write_text(json.dumps(given))
    refused = pytest.raises(SettingsError, match=r"model/generation_config\.json is not the file that .*step_4 was")
    with refused if is_refused else nullcontext():
        check_same_files(tmp_path / "model", start)


@pytest.mark.parametrize(
    ("section", "setting", "known", "says"),
    [
        (
            "rollout",
            "engine_args",
            "max_num_seqs",
            "max_num_seq: vLLM has no such argument. Did you mean max_num_seqs?",
        ),
        ("rollout", "engine_args", "quantization", "no_such_argument: vLLM has no such argument. Remove it."),
        (
            "learner",
            "deepspeed.zero_optimization",
            "stage3_max_live_parameters",
            "stage3_live_parameters: DeepSpeed has no such argument. Did you mean stage3_max_live_parameters?",
        ),
    ],
)
def test_argument_that_the_library_does_not_have_is_refused(section: str, setting: str, known: str, says: str) -> None:
    def given(name: str) -> Settings:
        field, _, inside = setting.partition(".")
        return Settings.model_validate({section: {field: {inside: {name: 1}} if inside else {name: 1}}})

    check_engine_args(given(known))
    with pytest.raises(SettingsError) as refused:
        check_engine_args(given(says.partition(":")[0]))
    assert str(refused.value) == f"settings: {section}.{setting}.{says}"


def test_start_says_that_the_rows_of_a_file_of_answers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert notice_kept_answers(path) is None
    path.touch()
    assert notice_kept_answers(path) is None
    path.write_text("{}\n")
    assert notice_kept_answers(path) == f"{path} has rows already: they are kept, and only missing rows are sampled."
