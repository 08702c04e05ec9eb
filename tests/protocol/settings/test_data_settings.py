"""What data.train and data.eval may name, in a file and on the command line."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.settings.data import DataEntry, entries_of, in_words
from protocol.settings.loader import load_settings, save_settings


def load(*options: str) -> object:
    return load_settings(None, options).data.train


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


def test_wrong_kind_of_data_is_named_by_its_setting_alone(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("data: {train: 5}")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path / "s.yaml", [])
    assert {line.partition(" is wrong")[0] for line in str(caught.value).splitlines()} == {"settings: data.train = 5"}
