"""Loading: options over file over defaults, and one clear sentence for every mistake."""

from pathlib import Path

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

_AS_JSON = """Give lists and maps as JSON, in single quotes: '["a", "b"]' or '{"name": 1}'."""
_TOO_LARGE = "Input should be less than or equal to 2147483647"


def refusal(options: list[str], config: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config, options)
    assert caught.value.exit_code == 2
    return str(caught.value)


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_load_returns_the_defaults_when_nothing_is_given() -> None:
    assert load_settings(None, []) == Settings()


def test_load_lays_options_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "learner:\n  lr: 1e-3\n  max_staleness: 4\n")
    settings = load_settings(config, ["--learner.max_staleness", "2"])
    assert (settings.learner.lr, settings.learner.max_staleness, settings.learner.groups_per_step) == (1e-3, 2, 32)


def test_load_takes_the_last_of_a_repeated_option() -> None:
    assert load_settings(None, ["--learner.lr", "1", "--learner.lr=2e-3"]).learner.lr == 2e-3


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
            '{"seed": 1, "enforce_eager": true}',
            "--learner.betas",
            "[0.5, 0.75]",
        ],
    )
    assert settings.rewards.endpoints[0].weight == 2.0
    assert str(settings.rewards.endpoints[0].url) == "http://127.0.0.1:9/r"
    assert settings.rollout.engine_args == {"seed": 1, "enforce_eager": True}
    assert settings.learner.betas == (0.5, 0.75)


def test_load_merges_a_map_option_into_the_file_s_map(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "rollout:\n  engine_args: {seed: 1, max_num_seqs: 8}\n")
    settings = load_settings(config, ["--rollout.engine_args", '{"seed": 2}'])
    assert settings.rollout.engine_args == {"seed": 2, "max_num_seqs": 8}


def test_load_reads_null_as_not_set(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "data: {eval: held_out.jsonl}\nretriever: {url: 'http://127.0.0.1:8000/retrieve'}\n")
    settings = load_settings(config, ["--data.eval", "null", "--retriever.url", "null"])
    assert (settings.data.eval, settings.retriever.url) == (None, None)


def test_load_keeps_digits_as_text_where_text_is_wanted() -> None:
    assert load_settings(None, ["--policy.model", "123"]).policy.model == "123"


def test_load_reads_a_number_from_a_list_of_choices() -> None:
    assert load_settings(None, ["--learner.zero_stage", "2"]).learner.zero_stage == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--learner.max_stalenes", "1"],
            "settings: learner.max_stalenes does not exist. Did you mean learner.max_staleness?",
        ),
        (
            ["--learner.learning_rate", "1"],
            "settings: learner.learning_rate does not exist. Did you mean learner.lr?",
        ),
        (["--model", "m"], "settings: model does not exist. Did you mean policy.model?"),
        (
            ["--policy.group_size", "8"],
            "settings: policy.group_size does not exist. Did you mean rollout.group_size?",
        ),
        (["--run.seed", str(2**31)], f"settings: run.seed = '{2**31}' is wrong: {_TOO_LARGE}."),
        (["--zebra", "1"], "settings: zebra does not exist. --help lists every setting."),
        (
            ["--rollout.engine_args.seed", "1"],
            "settings: rollout.engine_args.seed does not exist. Did you mean rollout.engine_args?",
        ),
        (["--learnr.lr", "1"], "settings: learnr.lr does not exist. Did you mean learner.lr?"),
        (
            ["--policy.dtype", "bfloat6"],
            "settings: policy.dtype = 'bfloat6' is wrong: Input should be 'float32' or 'bfloat16'. "
            "Did you mean bfloat16?",
        ),
        (
            ["--run.dir", "s3://bucket/runs"],
            "settings: run.dir = 's3://bucket/runs' is wrong: expected a path of this machine, not a URL; only "
            "learner.copy_checkpoints_to takes one.",
        ),
        (["learner.lr=1e-6"], "settings: learner.lr=1e-6 is not an option. Write --learner.lr 1e-6."),
        (
            ["actor_rollout_ref.rollout.n=8"],
            "settings: actor_rollout_ref.rollout.n=8 is not an option. Write --rollout.group_size 8, if it is the same "
            "setting.",
        ),
        (["+zebra=1"], "settings: +zebra=1 is not an option. --help lists every setting."),
        (["stray"], "settings: unrecognized arguments: stray. --help lists every setting."),
        (["--learner.lr"], "settings: argument --learner.lr: expected one argument. --help lists every setting."),
        (
            ["--learner.lr", "fast"],
            "settings: learner.lr = 'fast' is wrong: expected a number.",
        ),
        (
            ["--learner.max_staleness", "-1"],
            "settings: learner.max_staleness = '-1' is wrong: Input should be greater than or equal to 0.",
        ),
        (
            ["--run.seed", "1.5"],
            "settings: run.seed = '1.5' is wrong: expected a whole number.",
        ),
        (
            ["--rewards.endpoints", '[{"name": "em"}]'],
            "settings: rewards.endpoints.0.url = {'name': 'em'} is wrong: Field required.",
        ),
        (
            ["--learner.groups_per_step", "6", "--learner.num_ranks", "4"],
            "settings: learner.groups_per_step = 6 cannot be split over 4 ranks. "
            "Use a multiple of 4, or set learner.num_ranks to one of [1, 2, 3, 6].",
        ),
        (
            ["--rollout.engine_args", '{"seed": 1'],
            'settings: rollout.engine_args = {"seed": 1 is wrong: Missing end delimiter "}". ' + _AS_JSON,
        ),
        (
            ["--rollout.engine_args", "{}", "--rollout.engine_args", "[1]"],
            f"settings: rollout.engine_args = [1] is wrong: it is not the expected JSON. {_AS_JSON}",
        ),
        (["--run="], f"settings: run =  is wrong: it is not the expected JSON. {_AS_JSON}"),
        (
            ["--rewards.endpoints", '[{"url": "http://me:secret@host"'],
            """settings: rewards.endpoints = [{"url": "http://***@host" is wrong: Missing end delimiter "]". """
            + _AS_JSON,
        ),
        (
            ["--rollout", "[1]"],
            "settings: rollout = [1] is wrong: expected a map of settings; leave out a section that has none.",
        ),
    ],
)
def test_load_explains_a_wrong_option(options: list[str], text: str) -> None:
    assert refusal(options) == text


def test_load_explains_every_mistake_of_a_file_at_once(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "learner: {lrr: 1, groups_per_step: 0}\n")
    assert refusal([], config) == (
        "settings: learner.groups_per_step = 0 is wrong: Input should be greater than 0.\n"
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
    settings = load_settings(None, ["--learner.lr", "0.5", "--rollout.engine_args", '{"seed": 1}'])
    described = describe_settings(settings)
    assert [row for row in described if row[2]] == [
        ("rollout.engine_args", '{"seed": 1}', True),
        ("learner.lr", "0.5", True),
    ]
    assert ("data.eval", "null", False) in described


def test_described_values_are_what_the_command_line_takes() -> None:
    settings = load_settings(None, ["--learner.betas", "[0.5, 0.75]", "--policy.trust_remote_code", "true"])
    options = [part for name, value, _ in describe_settings(settings) for part in (f"--{name}", value)]
    assert load_settings(None, options) == settings


def test_password_that_was_refused_inside_a_url_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, ["--retriever.url", "http://me:hidden@host/retrieve"])
    assert str(refused.value) == (
        "settings: retriever.url = 'http://***@host/retrieve' is wrong: holds a user or password, which "
        "would be in settings.yaml and logs. Use headers_env."
    )


@pytest.mark.parametrize("name", ["api_key", "key", "access_token", "X-Amz-Signature", "apikey", "Password", "auth"])
def test_key_in_the_query_of_a_url_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, ["--retriever.url", f"http://host/retrieve?topk=3&{name}=hidden"])
    assert str(refused.value) == (
        f"settings: retriever.url = 'http://host/retrieve?***' is wrong: holds the secret {name!r}, which "
        "would be in settings.yaml and logs. Use headers_env."
    )


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://b/exp[1]", "holds [, which fsspec reads as a pattern: other folders would be removed too."),
        ("s3://b/exp*", "holds *, which fsspec reads as a pattern: other folders would be removed too."),
        ("file://copies", "is another folder wherever the command is given. Give a whole path: file:///FOLDER."),
    ],
)
def test_store_of_copies_that_is_not_one_folder_is_refused(url: str, why: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, ["--learner.copy_checkpoints_to", url])
    assert str(refused.value) == f"settings: learner.copy_checkpoints_to = '{url}' is wrong: {why}"


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
        "learner: {lr: 0.5, sequence_parallel: 1}\nrollout: {engine_args: {seed: 1}}\nother: {a: 1}\n"
        "rewards: {endpoints: [{name: em, url: 'http://h/r', shadow: false}]}\n"
    )
    settings = load_saved_settings(path)
    assert [endpoint.name for endpoint in settings.rewards.endpoints] == ["em"]
    assert (settings.learner.lr, settings.rollout.engine_args) == (0.5, {"seed": 1})
    assert refusal([], path) == (
        "settings: rewards.endpoints.0.shadow, learner.sequence_parallel do not exist any more; Sluice 0.1.0 reads "
        "them. Remove them. A shadow endpoint is now one with weight 0.\n"
        "settings: other does not exist. --help lists every setting."
    )


def test_option_that_was_removed_is_refused_with_the_version_that_reads_it() -> None:
    assert refusal(["--rewards.shadow_wait_s", "5"]) == (
        "settings: rewards.shadow_wait_s does not exist any more; Sluice 0.1.0 reads it. Remove it."
    )


def test_saved_settings_with_a_setting_that_the_algorithm_does_not_read_are_read(tmp_path: Path) -> None:
    """An earlier version took them: its run folders have an audit and a report all the same."""
    path = tmp_path / "settings.yaml"
    path.write_text("learner: {gamma: 0.9}\ntools: {mcp: [{name: one, command: [server], folder: ''}]}\n")
    settings = load_saved_settings(path)
    assert (settings.learner.gamma, settings.tools.mcp[0].folder) == (0.9, "")
    with pytest.raises(SettingsError, match=r"learner.gamma = 0.9 has no effect"):
        load_settings(path, [])
