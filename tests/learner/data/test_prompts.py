"""Prompts from files of ours, verl and OpenRLHF; a bad row is refused by its number."""

import json
from pathlib import Path

import pytest

from learner.data.prompt_set import load_prompts
from learner.data.prompts import MAX_ROW_BYTES, GroupName
from protocol.errors import SettingsError
from protocol.settings.data import DataSettings
from protocol.wire.codec import Decoder, encode
from protocol.wire.messages import Lease, Message, ToServer


def jsonl(tmp_path: Path, *rows: object) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def refusal(path: str, data: DataSettings | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_prompts(path, data or DataSettings())
    return str(caught.value)


def test_load_returns_rows_in_file_order_with_their_other_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a?", "label": "A", "hops": 1}, "", {"prompt": "b?", "label": ["B", "b"]})
    first, second = load_prompts(path, DataSettings())
    assert (first.prompt, first.label, first.columns) == ("a?", "A", {"hops": 1})
    assert (second.prompt, second.label, second.columns) == ("b?", ["B", "b"], {})


def test_load_gives_equal_rows_uids_of_their_own_and_the_same_ones_every_time(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a?", "label": "A"}, {"prompt": "a?", "label": "A"})
    first, second = load_prompts(path, DataSettings())
    assert first.uid != second.uid
    assert [p.uid for p in load_prompts(path, DataSettings())] == [first.uid, second.uid]


def test_load_reads_rows_of_verl(tmp_path: Path) -> None:
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "who?"}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["X"]}},
        "extra_info": {"split": "train", "index": 0},
    }
    (prompt,) = load_prompts(jsonl(tmp_path, row), DataSettings())
    assert prompt.prompt == [{"role": "user", "content": "who?"}]
    assert prompt.label == {"target": ["X"]}
    assert sorted(prompt.columns) == ["ability", "data_source", "extra_info", "reward_model"]


def test_load_reads_rows_under_other_keys(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"input": "a?", "answer": 4})
    (prompt,) = load_prompts(path, DataSettings(prompt_key="input", label_key="answer"))
    assert (prompt.prompt, prompt.label) == ("a?", 4)


def test_load_takes_rows_without_label_when_told_to(tmp_path: Path) -> None:
    (prompt,) = load_prompts(jsonl(tmp_path, {"prompt": "a?"}), DataSettings(label_required=False))
    assert prompt.label is None


@pytest.mark.parametrize(
    ("prompt", "shown"), [("", "''"), (None, "None"), ([], "[]"), ([{"role": "user"}], "[{'role': 'user'}]")]
)
def test_load_names_the_row_without_a_prompt(tmp_path: Path, prompt: object, shown: str) -> None:
    path = jsonl(tmp_path, {"prompt": prompt, "label": "A"})
    assert refusal(path) == (
        f"data: {path} line 1 has prompt = {shown}, expected text or a list of chat messages with role and content. "
        "Set data.prompt_key to one of ['label', 'prompt'], or fix the row."
    )


@pytest.mark.parametrize("prompt", ["<image>What is x?", [{"role": "user", "content": "<image>What is x?"}]])
def test_load_names_the_row_whose_prompt_shows_a_picture(tmp_path: Path, prompt: object) -> None:
    path = jsonl(tmp_path, {"prompt": "1?", "label": "1"}, {"prompt": prompt, "label": "2", "images": [{"bytes": "x"}]})
    assert refusal(path) == (
        f"data: {path} line 2 has <image> in its prompt and images in a column, and a policy reads text only. Leave "
        "the row out."
    )


@pytest.mark.parametrize("row", [{"images": []}, {"images": None}, {"image": "<image>"}, {}])
def test_a_prompt_that_speaks_of_pictures_and_has_none_is_taken(tmp_path: Path, row: dict[str, object]) -> None:
    path = jsonl(tmp_path, {"prompt": "What does <image> mean in HTML?", "label": "2", **row})
    assert len(load_prompts(path, DataSettings())) == 1


def test_load_names_the_row_that_is_too_long_for_a_lease(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "x" * MAX_ROW_BYTES, "label": "A"})
    assert refusal(path).startswith(f"data: {path} line 1 has {MAX_ROW_BYTES + 9} bytes, at most {MAX_ROW_BYTES}.")


def test_load_names_the_row_that_nests_too_deep_for_a_lease(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a?", "label": "A", "tree": json.loads("[" * 40 + "1" + "]" * 40)})
    assert refusal(path) == f"data: {path} line 1 nests deeper than 32. Shorten the row."


def test_load_names_the_row_of_more_columns_than_a_lease_may_have(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a?", "label": "A"} | {f"c{i}": i for i in range(1025)})
    assert refusal(path) == (
        f"data: {path} line 1 cannot be sent: Expected `object` of length <= 1024 - at `$[2]`. Shorten the row."
    )


def test_the_largest_row_fits_a_lease(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a?", "label": list(range(49_000)), "text": "x" * 600_000})
    (prompt,) = load_prompts(path, DataSettings())
    indices = list(range(4096))
    lease = Lease(
        run_id="r" * 200, incarnation=1, number=1, group="g" * 200, attempt=1, kind="train", prompt=prompt.prompt,
        label=prompt.label, columns=prompt.columns, sample_indices=indices, greedy_indices=indices, seed=1,
    )  # fmt: skip
    decoder: Decoder[Message] = Decoder(ToServer)
    assert decoder.decode(encode(lease)) == (lease, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (GroupName("train", 0, "aa"), "e0-aa"),
        (GroupName("train", 12, "file-7"), "e12-file-7"),
        (GroupName("eval", 50, "aa"), "eval-50-aa"),
        (GroupName("eval", 0, "e1-aa"), "eval-0-e1-aa"),
    ],
)
def test_a_group_name_is_read_as_it_was_written(name: GroupName, text: str) -> None:
    assert str(name) == text
    assert GroupName.parse(text) == name


@pytest.mark.parametrize("text", ["", "aa", "e-aa", "e1", "e1-", "eval-aa", "xe1-aa", "eval-1-"])
def test_what_is_no_group_name_is_not_read(text: str) -> None:
    assert GroupName.parse(text) is None
