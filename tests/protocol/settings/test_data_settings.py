"""What data.train and data.eval may name, in a file and on the command line."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.data import DataEntry, entries_of, in_words
from protocol.settings.loader import load_settings, save_settings


def load(*options: str) -> object:
    return load_settings(None, options).data.train


def refusal(*options: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, options)
    return str(caught.value)


def test_path_may_have_commas() -> None:
    assert load("--data.train", "a,b.jsonl") == "a,b.jsonl"
    assert load("--data.train=12") == "12"


def test_list_is_given_as_json_on_the_command_line() -> None:
    assert load("--data.train", '["a.jsonl", "b,c.jsonl"]') == ["a.jsonl", "b,c.jsonl"]
    assert load("--data.train", '[{"path": "a", "weight": 2}]') == [DataEntry(path="a", weight=2.0)]


def test_held_out_set_can_be_taken_back_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("data: {eval: held.jsonl}")
    assert load_settings(tmp_path / "s.yaml", []).data.eval == "held.jsonl"
    assert load_settings(tmp_path / "s.yaml", ["--data.eval", "null"]).data.eval is None


def test_saved_list_is_read_back_as_it_was(tmp_path: Path) -> None:
    options = ["--data.train", '[{"path": "a", "weight": 2}, {"path": "hf:o/n", "weight": 1}]']
    absolute = load_settings(None, options, tmp_path)
    assert [entry.path for entry in entries_of(absolute.data.train)] == [f"{tmp_path}/a", "hf:o/n"]
    save_settings(absolute, tmp_path / "s.yaml")
    assert load_settings(tmp_path / "s.yaml", []) == absolute
    assert absolute.data.weights() == [2.0, 1.0]
    assert in_words(absolute.data.train) == f"{tmp_path}/a and 1 more"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            '["a", {"path": "b", "wieght": 2}]',
            "entry 2 has 'wieght', which does not exist. Expected some of path, weight",
        ),
        ('["a", 3]', "entry 2 is 3, expected a path, or a map with path, weight and others"),
        ('[{"path": "b", "weight": 0}]', "entry 1 has weight = 0: Input should be greater than 0"),
        ('["a"', "is a list but not JSON"),
        ('[{"path": "a", "weight": 2}, "b"]', "data.train has entries with and without a weight. Give every one"),
    ],
)
def test_wrong_list_is_refused_in_words(given: str, says: str) -> None:
    assert says in refusal("--data.train", given)


def test_limit_over_weighted_entries_is_refused() -> None:
    assert "does not say which of data.train's weighted entries it limits" in refusal(
        "--data.train", '[{"path": "a", "weight": 2}]', "--data.max_prompts", "5"
    )


def test_held_out_names_on_the_hub_need_a_split() -> None:
    assert "data.eval = hf:o/n names no split, and train is the default" in refusal("--data.eval", "hf:o/n")


def test_easy_and_hard_prompts_are_told_apart() -> None:
    assert "hard = 0.5 is not below easy = 0.5" in refusal(
        "--data.curriculum.easy", "0.5", "--data.curriculum.hard", "0.5"
    )


def test_wrong_kind_of_data_is_named_by_its_setting_alone(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("data: {train: 5}")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path / "s.yaml", [])
    assert {line.partition(" is wrong")[0] for line in str(caught.value).splitlines()} == {"settings: data.train = 5"}
