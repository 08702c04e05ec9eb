"""Data sets of several files: lists, patterns, folders, names on the Hugging Face hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from learner.data.files import HubName, choose_files, find_files, parse_hub_name
from learner.data.prompt_reading import RowName, read_prompts
from learner.data.prompt_set import load_prompts, open_prompts, rows_by_entry
from protocol.errors import SettingsError
from protocol.settings.data import DataEntry, DataSettings, entries_of


def jsonl(path: Path, *prompts: str, key: str = "prompt") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({key: prompt, "label": prompt.upper()}) + "\n" for prompt in prompts))
    return str(path)


def names(*given: str) -> list[str]:
    return [file.name for file in find_files(entries_of(list(given)))]


def refusal(*given: str) -> str:
    with pytest.raises(SettingsError) as caught:
        find_files(entries_of(list(given)))
    return str(caught.value)


def test_files_of_a_list_are_one_data_set_in_their_order(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "c", "label": "C"}])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    given = [jsonl(tmp_path / "z.jsonl", "a", "b"), str(tmp_path / "b.parquet"), jsonl(tmp_path / "a.jsonl", "d")]
    prompts = load_prompts(given, DataSettings())
    assert [prompt.prompt for prompt in prompts] == ["a", "b", "c", "d"]
    assert [prompts[-1].label, prompts[2].label] == ["D", "C"]
    assert rows_by_entry(prompts) == [2, 1, 1]
    assert len({prompt.uid for prompt in prompts}) == 4


def test_pattern_and_folder_stand_for_their_files_by_name(tmp_path: Path) -> None:
    for name in ("rows/2.jsonl", "rows/1.jsonl", "rows/1.jsonl.gz", "rows/notes.txt", "more/3.jsonl"):
        jsonl(tmp_path / name, name)
    assert names(str(tmp_path / "rows")) == ["1.jsonl", "2.jsonl"]
    assert names(str(tmp_path / "*" / "*.jsonl")) == ["3.jsonl", "1.jsonl", "2.jsonl"]
    assert names(str(tmp_path / "**" / "[12].jsonl")) == ["1.jsonl", "2.jsonl"]


def test_file_whose_name_has_signs_of_a_pattern_is_the_file(tmp_path: Path) -> None:
    assert names(jsonl(tmp_path / "a[1].jsonl", "a")) == ["a[1].jsonl"]


def test_one_file_alone_has_the_uids_that_it_has_in_a_list(tmp_path: Path) -> None:
    one, other = jsonl(tmp_path / "one.jsonl", "a"), jsonl(tmp_path / "other.jsonl", "a")
    assert load_prompts([one, other], DataSettings())[0].uid == load_prompts(one, DataSettings())[0].uid


def test_equal_rows_of_files_with_one_name_have_uids_of_their_own(tmp_path: Path) -> None:
    given = [jsonl(tmp_path / "x" / "train.jsonl", "a"), jsonl(tmp_path / "y" / "train.jsonl", "a")]
    assert names(*given) == ["train.jsonl", "2/train.jsonl"]
    first, second = load_prompts(given, DataSettings())
    assert first.uid != second.uid


def test_each_entry_may_have_columns_a_template_and_a_limit_of_its_own(tmp_path: Path) -> None:
    given: list[str | DataEntry] = [
        DataEntry(path=jsonl(tmp_path / "a.jsonl", "a", "b", "c", key="q"), prompt_key="q", max_prompts=2),
        DataEntry(path=jsonl(tmp_path / "b.jsonl", "d"), template="Say {prompt}: {label}"),
        jsonl(tmp_path / "c.jsonl", "e"),
    ]
    assert [prompt.prompt for prompt in load_prompts(given, DataSettings())] == ["a", "b", "Say d: D", "e"]


def test_rows_that_are_left_out_are_told_apart_by_their_files(tmp_path: Path) -> None:
    given = [jsonl(tmp_path / "a.jsonl", "a", "b"), jsonl(tmp_path / "b.jsonl", "c", "d")]
    index, _ = read_prompts(given, DataSettings(), without=[RowName("b.jsonl", 1)])
    assert [file.num_rows for file in index.files] == [2, 1]
    index.save(tmp_path / "index.npz")
    assert [prompt.prompt for prompt in open_prompts(given, DataSettings(), tmp_path / "index.npz")] == ["a", "b", "d"]


def test_index_is_read_anew_for_other_settings(tmp_path: Path) -> None:
    given = jsonl(tmp_path / "a.jsonl", "a", "b")
    index, _ = read_prompts(given, DataSettings())
    index.save(tmp_path / "index.npz")
    (prompt,) = open_prompts(given, DataSettings(max_prompts=1), tmp_path / "index.npz")
    assert prompt.prompt == "a"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["{}/none.jsonl"], "data: {}/none.jsonl does not exist."),
        (["{}/none*.jsonl"], "data: no file is called like {}/none*.jsonl. Change the pattern, or name the files."),
        (["{}/empty"], "data: the folder {}/empty has no *.jsonl and no *.parquet. Name the files."),
        (["{}/a.jsonl", "{}/*.jsonl"], "data: {}/a.jsonl is named twice, by {}/a.jsonl and by {}/*.jsonl."),
        (["{}/both"], "data: {}/both has rows.jsonl and rows.parquet, which may be the same rows in two forms. Remove"),
        (["{}/both/*"], "data: {}/both/* has rows.jsonl and rows.parquet, which may be the same rows in two forms. Re"),
        (["{}/packed"], "data: {}/packed/b.jsonl.gz is packed, and rows are read one by one in any order. Unpack it"),
        (["{}/a.jsonl.gz"], "data: {}/a.jsonl.gz is packed, and rows are read one by one in any order. Unpack it"),
        (["hf:a b"], "data: hf:a b is not a name on the Hugging Face hub. Write hf:OWNER/NAME[/CONFIG]"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, given: list[str], says: str) -> None:
    (tmp_path / "empty").mkdir()
    jsonl(tmp_path / "a.jsonl", "a")
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    for name in ("both/rows.jsonl", "both/rows.parquet", "packed/a.jsonl", "packed/b.jsonl.gz"):
        jsonl(tmp_path / name, "a")
    at = str(tmp_path)
    assert refusal(*(one.replace("{}", at) for one in given)).startswith(says.replace("{}", at))


def test_name_on_the_hub_is_read_part_by_part() -> None:
    assert parse_hub_name("hf:openai/gsm8k/main:test") == HubName("openai/gsm8k", "main", None, "test")
    assert parse_hub_name("hf:o/n") == HubName("o/n", None, None, "train")
    assert parse_hub_name("hf:o/n@abc12:train") == HubName("o/n", None, "abc12", "train")
    assert parse_hub_name("hf:squad") == HubName("squad", None, None, "train")


@pytest.mark.parametrize(
    ("listed", "config", "chosen"),
    [
        (["default/train/0001.parquet", "default/train/0000.parquet", "default/test/0000.parquet"], None, [1, 0]),
        (["main/train/0000.parquet", "socratic/train/0000.parquet"], "socratic", [1]),
        (["main/partial-train/0000.parquet"], None, []),  # the first rows of a split above 5 GB
        (["README.md", "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], None, [1]),
        (["train.jsonl", "test.jsonl", "training.jsonl"], None, [0]),
        (["main/test-00000-of-00001.parquet"], "main", []),
        (["data/train_prefs-00000-of-00001.parquet", "data/train_sft-00000-of-00002-0a1b.parquet"], None, []),
        (["data/train_sft-00000-of-00001.parquet", "data/train-00000-of-00001-0a1b.parquet"], None, [1]),
    ],
)
def test_files_of_a_split_are_found_in_both_layouts(listed: list[str], config: str | None, chosen: list[int]) -> None:
    assert choose_files(listed, HubName("o/n", config, None, "train")) == [listed[place] for place in chosen]


def test_data_set_of_several_configs_asks_for_one() -> None:
    with pytest.raises(SettingsError, match=r"hf:o/n has the configs main, socratic\. Name one: hf:o/n/main:train\."):
        choose_files(["main/train/0.parquet", "socratic/train/0.parquet"], HubName("o/n", None, None, "train"))


def test_data_set_in_the_cache_is_used_without_a_network(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "datasets--o--n"
    file = repo / "snapshots" / "abc" / "main" / "train" / "0000.parquet"
    file.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "label": "A"}]), file)
    (repo / "refs" / "refs" / "convert").mkdir(parents=True)
    (repo / "refs" / "refs" / "convert" / "parquet").write_text("abc")
    script = (
        "from learner.data.prompt_set import load_prompts\n"
        "from protocol.settings.data import DataSettings\n"
        "print(load_prompts('hf:o/n', DataSettings())[0].prompt)\n"
        "try:\n    load_prompts('hf:o/other', DataSettings())\n"
        "except Exception as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert first == "a"
    assert second.startswith("data: hf:o/other is not in reach of the Hugging Face hub")
