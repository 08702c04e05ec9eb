"""Loading: options over file over defaults, and one clear sentence for every mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.settings.loader import (
    describe_settings,
    load_saved_settings,
    load_settings,
    names_own_run,
    save_settings,
    settings_help,
)
from protocol.settings.settings import Settings
from tests.protocol.settings.refusal import yaml_file


def refusal(options: list[str], config: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config, options)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_load_returns_the_defaults_when_nothing_is_given() -> None:
    assert load_settings(None, []) == Settings()


def test_load_lays_options_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "learner:\n  lr: 1e-3\n  max_staleness: 4\n")
    settings = load_settings(config, ["--learner.max_staleness", "2"])
    assert (settings.learner.lr, settings.learner.max_staleness, settings.learner.groups_per_step) == (1e-3, 2, 32)


def test_load_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEARNER", '{"lr": 5}')
    monkeypatch.setenv("LEARNER__LR", "5")
    assert load_settings(None, ["--run.seed", "3"]) == load_settings(None, []).model_copy(
        update={"run": Settings().run.model_copy(update={"seed": 3})}
    )


def test_load_reads_lists_and_maps_as_json() -> None:
    settings = load_settings(
        None,
        [
            "--rewards.endpoints",
            '[{"name": "em", "url": "http://127.0.0.1:9/r", "weight": 2}]',
            "--rollout.engine_args",
            '{"block_size": 1, "enforce_eager": true}',
            "--learner.betas",
            "[0.5, 0.75]",
        ],
    )
    assert settings.rewards.endpoints[0].weight == 2.0
    assert str(settings.rewards.endpoints[0].url) == "http://127.0.0.1:9/r"
    assert settings.rollout.engine_args == {"block_size": 1, "enforce_eager": True}
    assert settings.learner.betas == (0.5, 0.75)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling.stop", ["\n\n", "\t", "a\\b", 'x"y', "\u4f60", ", "]),
        ("tools.mcp", [{"name": "m", "command": ["sh", "-c", 'printf "a\n\\"']}]),
        ("rollout.chat_template_kwargs", {"a": "x\n\\", "b": ['"']}),
        ("data.train", ["a\u00e4.jsonl", 'c,"d.jsonl']),
    ],
)
def test_escapes_of_json_are_read_on_the_command_line(name: str, value: Any) -> None:
    section, key = name.split(".")
    others = ["--rollout.environment", "tools"] if section == "tools" else []
    environment: dict[str, Any] = {"rollout": {"environment": "tools"}} if others else {}
    expected = Settings.model_validate({**environment, section: {key: value}})
    for given in ([f"--{name}", json.dumps(value)], [f"--{name}={json.dumps(value)}"]):
        assert load_settings(None, [*others, *given]) == expected


@pytest.mark.parametrize(
    ("given", "stop"),
    [(" END", [" END"]), ("\n", ["\n"]), ('" END"', [" END"]), ("END", ["END"]), ("5", ["5"]), ('"', ['"'])],
)
def test_one_stop_string_on_the_command_line_keeps_its_blanks(given: str, stop: list[str]) -> None:
    assert load_settings(None, ["--sampling.stop", given]).sampling.stop == stop
    assert load_settings(None, [f"--sampling.stop={given}"]).sampling.stop == stop


def test_a_bare_comma_in_stop_strings_is_refused() -> None:
    with pytest.raises(SettingsError, match=re.escape("""Give '["Hi, you"]' or '["Hi", " you"]'.""")):
        load_settings(None, ["--sampling.stop", "Hi, you"])


def test_text_that_looks_like_a_list_with_escapes_stays_text() -> None:
    assert load_settings(None, ["--data.system_prompt", '["\\n"]']).data.system_prompt == '["\\n"]'


def test_load_merges_a_map_option_into_the_file_s_map(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "rollout:\n  engine_args: {block_size: 1, max_num_seqs: 8}\n")
    settings = load_settings(config, ["--rollout.engine_args", '{"block_size": 2}'])
    assert settings.rollout.engine_args == {"block_size": 2, "max_num_seqs": 8}
    assert load_settings(config, ["--rollout.engine_args", "{}"]).rollout.engine_args == {}


def test_load_reads_null_as_not_set(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "data: {eval: held_out.jsonl}\nretriever: {url: 'http://127.0.0.1:8000/retrieve'}\n")
    settings = load_settings(config, ["--data.eval", "null", "--retriever.url", "null"])
    assert (settings.data.eval, settings.retriever.url) == (None, None)


def test_load_keeps_digits_as_text_where_text_is_wanted() -> None:
    assert load_settings(None, ["--policy.model", "123"]).policy.model == "123"


def test_load_reads_a_number_from_a_list_of_choices() -> None:
    assert load_settings(None, ["--learner.zero_stage", "2"]).learner.zero_stage == 2


def test_load_explains_every_mistake_of_a_file_at_once(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "learner: {lrr: 1, groups_per_step: 0}\n")
    assert refusal([], config) == (
        "settings: learner.groups_per_step = 0 is wrong: expected more than 0.\n"
        "settings: learner.lrr does not exist. Did you mean learner.lr?"
    )


def test_load_explains_a_missing_file(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert refusal([], missing) == (
        f"settings: --config {missing} cannot be read: No such file or directory. Give an existing YAML file."
    )


@pytest.mark.parametrize(
    ("options", "is_own"),
    [
        ([], False),
        (["--learner.lr", "1"], False),
        (["--policy.dtype", "float32", "--data.eval", "e.jsonl"], False),
        (["--policy.model", "mine"], True),
        (["--data.train=mine.jsonl"], True),
        (["--policy", '{"model": "mine"}'], True),
    ],
)
def test_command_that_names_a_model_or_prompts_is_the_users_own_run(options: list[str], is_own: bool) -> None:
    assert names_own_run(options) is is_own


def test_saved_settings_are_read_back_as_they_were(tmp_path: Path) -> None:
    settings = load_settings(
        None,
        [
            "--rewards.endpoints",
            '[{"name": "em", "url": "http://127.0.0.1:9/r", "headers_env": {"X-Key": "KEY"}}]',
            "--learner.betas",
            "[0.5, 0.75]",
            "--learner.lr",
            "1e-6",
            "--policy.model",
            "123",
            "--rollout.engine_args",
            '{"hf_overrides": {"a": [1, null]}}',
        ],
    )
    save_settings(settings, tmp_path / "saved.yaml")
    assert load_settings(tmp_path / "saved.yaml", []) == settings


def test_help_documents_every_setting() -> None:
    text = " ".join(settings_help().split())
    for name, _, _ in describe_settings(Settings()):
        assert f"--{name} " in text, name
    assert "Optimizer steps a trained token may lag behind; 0 is synchronous. (default: 1)" in text


def test_describe_marks_what_differs_from_its_default() -> None:
    settings = load_settings(None, ["--learner.lr", "0.5", "--rollout.engine_args", '{"block_size": 1}'])
    described = describe_settings(settings)
    assert [row for row in described if row[2]] == [
        ("rollout.engine_args", '{"block_size": 1}', True),
        ("learner.lr", "0.5", True),
    ]
    assert ("data.eval", "null", False) in described


def test_described_values_are_what_the_command_line_takes() -> None:
    settings = load_settings(None, ["--learner.betas", "[0.5, 0.75]", "--policy.trust_remote_code", "true"])
    options = [part for name, value, _ in describe_settings(settings) for part in (f"--{name}", value)]
    assert load_settings(None, options) == settings


@pytest.mark.parametrize("name", ["api_key", "key", "access_token", "X-Amz-Signature", "apikey", "Password", "auth"])
def test_key_in_the_query_of_a_url_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, ["--retriever.url", f"http://host/retrieve?topk=3&{name}=hidden"])
    assert str(refused.value) == (
        f"settings: retriever.url = 'http://host/retrieve?***' is wrong: holds the secret {name!r}, which "
        "would be in settings.yaml and logs. Use headers_env."
    )


def test_url_may_have_a_query_without_a_secret() -> None:
    settings = load_settings(None, ["--retriever.url", "http://host/retrieve?topk=3&monkey=1&index=auth"])
    assert str(settings.retriever.url) == "http://host/retrieve?topk=3&monkey=1&index=auth"


@pytest.mark.parametrize(
    "line",
    [
        "run: {max_steps: yes}",
        "learner: {lr: on}",
        "eval: {every_steps: false}",
        "weights: {probe_tolerance: yes}",  # it would be a nat, with which nothing is noticed
        "placement: {ranks: {nodes: true}}",
        "placement: {servers: {resources: {h100: yes}}}",
        "learner: {zero_stage: on}",
        "critic: {zero_stage: on}",
        "learner: {betas: [0.9, yes]}",
        "sampling: {logit_bias: {7: yes}}",
    ],
)
def test_truth_value_is_no_number(tmp_path: Path, line: str) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(line)
    with pytest.raises(SettingsError, match="expected a number; YAML reads yes, no, on, off"):
        load_settings(config, [])


def test_truth_value_stays_one_where_the_setting_takes_it() -> None:
    given = {"weights": {"second_copy": True, "probe": False}, "rollout": {"engine_args": {"enforce_eager": True}}}
    settings = Settings.model_validate(given)
    assert (settings.weights.second_copy, settings.rollout.engine_args) == (True, {"enforce_eager": True})


def test_setting_written_as_one_key_in_a_file_is_refused_with_its_place(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text("learner.lr: 0.1")
    with pytest.raises(SettingsError) as refused:
        load_settings(config, [])
    assert str(refused.value) == (
        "settings: learner.lr is written as one key. In a YAML file it goes below its section: learner: {lr: ..}."
    )


def test_saved_settings_of_an_earlier_version_are_read_without_what_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "learner: {lr: 0.5, sequence_parallel: 1}\nrollout: {engine_args: {block_size: 1}}\nother: {a: 1}\n"
        "rewards: {endpoints: [{name: em, url: 'http://h/r', shadow: false}]}\n"
    )
    settings = load_saved_settings(path)
    assert [endpoint.name for endpoint in settings.rewards.endpoints] == ["em"]
    assert (settings.learner.lr, settings.rollout.engine_args) == (0.5, {"block_size": 1})
    assert refusal([], path) == (
        "settings: rewards.endpoints.0.shadow does not exist. Remove it, and give the endpoint weight 0.\n"
        "settings: learner.sequence_parallel does not exist. Remove it.\n"
        "settings: other does not exist. sluice run --help all lists every setting."
    )


def test_saved_settings_with_a_setting_that_the_algorithm_does_not_read_are_read(tmp_path: Path) -> None:
    """An earlier version took them: its run folders have an audit and a report all the same."""
    path = tmp_path / "settings.yaml"
    path.write_text(
        "learner: {gamma: 0.9}\nrollout: {environment: tools}\n"
        "tools: {mcp: [{name: one, command: [server], folder: ''}]}\n"
    )
    settings = load_saved_settings(path)
    assert (settings.learner.gamma, settings.tools.mcp[0].folder) == (0.9, "")
    with pytest.raises(SettingsError, match=r"learner.gamma = 0.9 has no effect"):
        load_settings(path, [])
