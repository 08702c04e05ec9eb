"""A settings file: what YAML reads otherwise than its reader would is refused, what is no settings is told."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.loader import load_settings
from protocol.settings.settings import Settings
from tests.protocol.settings.refusal import yaml_file


def refusal(config: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config, [])
    return str(caught.value)


def test_load_explains_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "learner: [1\n")
    assert refusal(config).startswith(f"settings: --config {config} is not YAML: while parsing a flow sequence")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("learner:\n  lr: 1\n  betas: [0, 0]\n  lr: 2\n", "line 4 has lr again, which line 2 has already."),
        ("run: {seed: 1}\nlearner: {lr: 1}\nrun: {name: a}\n", "line 3 has run again, which line 1 has already."),
    ],
)
def test_load_refuses_a_key_or_section_that_stands_twice(tmp_path: Path, text: str, problem: str) -> None:
    config = yaml_file(tmp_path, text)
    assert refusal(config) == f"settings: --config {config} {problem} Keep one of the two."


def test_load_takes_a_merged_map_whose_keys_are_given_anew(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "run: &run {seed: 1, name: a}\nrollout: {chat_template_kwargs: {<<: *run, seed: 2}}\n")
    assert load_settings(config, []).rollout.chat_template_kwargs == {"seed": 2, "name": "a"}


def test_load_takes_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert load_settings(yaml_file(tmp_path, "\ufeffrun: {seed: 7}\n"), []).run.seed == 7


def test_load_explains_a_file_that_is_a_list(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "- learner\n")
    assert refusal(config) == (
        f"settings: --config {config} is not a map of settings, such as learner: {{lr: 1.0e-6}}. See "
        "docs/look_up/settings.md."
    )


def test_load_takes_an_empty_file(tmp_path: Path) -> None:
    assert load_settings(yaml_file(tmp_path, ""), []) == Settings()


@pytest.mark.parametrize(
    ("line", "text", "number"),
    [
        ("run: {max_steps: 010}", "010", "8"),
        ("rollout: {turn_timeout_s: 60:00}", "60:00", "3600"),
        ("rollout: {turn_timeout_s: 1:30.5}", "1:30.5", "90.5"),
        ("rollout: {engine_args: {max_num_seqs: 0_17}}", "0_17", "15"),
    ],
)
def test_number_that_yaml_reads_as_another_is_refused(tmp_path: Path, line: str, text: str, number: str) -> None:
    config = yaml_file(tmp_path, f"policy: {{}}\n{line}\n")
    assert refusal(config) == (
        f"settings: --config {config} line 2 has {text}, which YAML reads as {number}. Write a plain number, or "
        f"'{text}' for text."
    )


def test_numbers_that_can_be_read_one_way_only_are_taken(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "rollout: {engine_args: {a: 0, b: -0.5, c: 1_000, d: 0x10, e: '010', f: 0.10, g: +7}}")
    assert list(load_settings(config, []).rollout.engine_args.values()) == [0, -0.5, 1000, 16, "010", 0.1, 7]


@pytest.mark.parametrize(("given", "shown"), [("", "null"), (" []", "[]"), (" 5", "5")])
def test_section_that_is_no_map_is_told(tmp_path: Path, given: str, shown: str) -> None:
    assert refusal(yaml_file(tmp_path, f"run:{given}\n")) == (
        f"settings: run = {shown} is wrong: expected a map of settings; leave out a section that has none."
    )


def test_setting_of_names_and_values_that_is_none_is_told(tmp_path: Path) -> None:
    assert refusal(yaml_file(tmp_path, "rollout: {engine_args: [1]}")) == (
        "settings: rollout.engine_args = [1] is wrong: expected a map of names and values, {} for none."
    )
