"""Data sets whose texts stay in their file: places, uids, rows that are left out, files that change."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from learner.data.prompt_index import load_index
from learner.data.prompt_reading import Refusal, RowName, read_prompts
from learner.data.prompt_set import find_prompts, load_prompts, open_prompts, prompts_digest, rows_digest, uid_at
from learner.data.prompts import Prompt
from protocol.errors import OperatorError, SettingsError
from protocol.settings.data import DataSettings

_DATA = DataSettings()
_ROWS = [{"prompt": f"{i} + {i} =", "label": str(2 * i), "hops": i} for i in range(5)]


def jsonl(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines or [json.dumps(row) for row in _ROWS]) + "\n", encoding="utf-8")
    return path


def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_ROWS), path)
    return path


def old_uid(name: str, number: int, prompt: object, label: object) -> str:
    """Return the uid as runs of older versions have it in their ledgers."""
    content = json.dumps([name, number, prompt, label], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:20]


@pytest.mark.parametrize("make", [jsonl, parquet])
def test_rows_are_read_in_any_order(tmp_path: Path, make: object) -> None:
    assert callable(make)
    prompts = load_prompts(str(make(tmp_path)), _DATA)
    assert len(prompts) == 5
    assert [prompts[place].label for place in (3, 0, -1)] == ["6", "0", "8"]
    assert [prompt.columns for prompt in prompts[1:3]] == [{"hops": 1}, {"hops": 2}]
    assert [prompt.uid for prompt in prompts] == [uid_at(prompts, place) for place in range(5)]
    with pytest.raises(IndexError):
        prompts[5]


def test_uids_and_their_digest_are_those_of_older_versions(tmp_path: Path) -> None:
    tricky = [
        {"prompt": 'é ☃ \u2028 "q"', "label": {"b": [1, 2.5, None], "a": True}},
        {"prompt": [{"role": "user", "content": "a?"}], "label": 1e-7},
        {"prompt": "big", "label": 2**63},
    ]
    path = jsonl(tmp_path, json.dumps(tricky[0], ensure_ascii=False), "", *map(json.dumps, tricky[1:]))
    expected = [
        old_uid("train.jsonl", number, row["prompt"], row["label"])
        for number, row in zip((1, 3, 4), tricky, strict=True)
    ]
    prompts = load_prompts(str(path), _DATA)
    assert [prompt.uid for prompt in prompts] == expected
    assert prompts_digest(prompts) == hashlib.sha256("\n".join(expected).encode()).hexdigest()
    assert prompts_digest(list(prompts)) == prompts_digest(prompts)


def test_digest_of_demonstrations_is_of_their_contents(tmp_path: Path) -> None:
    answers = ["4", "4", "5"]
    rows = [json.dumps({"prompt": "2 + 2 =", "completion": answer}) for answer in answers]
    data = DataSettings(form="demonstrations")
    digests = [rows_digest(load_prompts(str(jsonl(tmp_path, row)), data)) for row in rows]
    assert (digests[0] == digests[1], digests[0] == digests[2]) == (True, False)


def test_rows_that_are_judged_unusable_are_left_out_with_their_reasons(tmp_path: Path) -> None:
    def judge(prompts: Sequence[Prompt]) -> list[Refusal | None]:
        return [Refusal("is odd.") if prompt.columns["hops"] % 2 else None for prompt in prompts]

    path = jsonl(tmp_path)
    index, unusable = read_prompts(str(path), _DATA, judge)
    assert [str(one) for one in unusable] == [f"{path} line 2 is odd.", f"{path} line 4 is odd."]
    assert index.numbers.tolist() == [1, 3, 5]
    again, unusable = read_prompts(str(path), _DATA, judge, without=[one.row for one in unusable])
    assert (again.digest(), unusable) == (index.digest(), [])


def test_row_that_cannot_be_sent_is_left_out_and_one_that_is_no_json_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, json.dumps(_ROWS[0]), json.dumps({"prompt": "p", "label": 2**64}), json.dumps(_ROWS[1]))
    index, unusable = read_prompts(str(path), _DATA)
    assert index.numbers.tolist() == [1, 3]
    assert [one.row for one in unusable] == [RowName("train.jsonl", 2)]
    with pytest.raises(SettingsError, match="line 2 is not JSON"):
        read_prompts(str(jsonl(tmp_path, json.dumps(_ROWS[0]), "{")), _DATA)


def test_index_is_read_back_by_another_process_as_it_was(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    index, _ = read_prompts(str(path), _DATA)
    index.save(tmp_path / "index" / "train.npz")
    again = load_index(tmp_path / "index" / "train.npz")
    assert (again.digest(), again.key, again.files) == (index.digest(), index.key, index.files)
    assert np.array_equal(again.offsets, index.offsets)


def test_open_uses_the_index_that_is_there(tmp_path: Path) -> None:
    path, at = jsonl(tmp_path), tmp_path / "train.npz"
    index, _ = read_prompts(str(path), _DATA, without=[RowName("", 1)])
    index.save(at)
    assert len(open_prompts(str(path), _DATA, at)) == 4


def test_open_reads_the_file_when_the_index_is_of_another_state_of_it_or_none(tmp_path: Path) -> None:
    path, at = jsonl(tmp_path), tmp_path / "train.npz"
    assert len(open_prompts(str(path), _DATA, at)) == 5
    index, _ = read_prompts(str(path), _DATA, without=[RowName("", 1)])
    index.save(at)
    with path.open("a") as file:
        file.write(json.dumps(_ROWS[0]) + "\n")
    assert len(open_prompts(str(path), _DATA, at)) == 6
    at.write_bytes(b"nonsense")
    assert len(open_prompts(str(path), _DATA, at)) == 6


def test_open_reads_a_file_anew_that_has_other_rows_and_the_same_size(tmp_path: Path) -> None:
    path, at = jsonl(tmp_path), tmp_path / "train.npz"
    index, _ = read_prompts(str(path), _DATA)
    index.save(at)
    path.write_bytes(path.read_bytes().replace(b"3 + 3", b"3 + 4"))
    os.utime(path, ns=(1, 1))
    assert open_prompts(str(path), _DATA, at)[3].prompt == "3 + 4 ="


def test_open_leaves_out_the_same_rows_when_the_file_was_only_copied_over_itself(tmp_path: Path) -> None:
    path, at = jsonl(tmp_path), tmp_path / "train.npz"
    index, _ = read_prompts(str(path), _DATA, without=[RowName("", 1)])
    index.save(at)
    os.utime(path, ns=(1, 1))
    again = open_prompts(str(path), _DATA, at, without=[RowName("", 1)])
    assert prompts_digest(again) == index.digest()


def test_prompts_are_found_by_their_uids(tmp_path: Path) -> None:
    prompts = load_prompts(str(jsonl(tmp_path)), _DATA)
    wanted = [uid_at(prompts, 3), "00" * 10, uid_at(prompts, 1)]
    assert {uid: prompt.label for uid, prompt in find_prompts(prompts, wanted).items()} == {
        uid_at(prompts, 3): "6",
        uid_at(prompts, 1): "2",
    }
    assert find_prompts(prompts, []) == {}
    assert find_prompts(list(prompts), wanted).keys() == find_prompts(prompts, wanted).keys()


@pytest.mark.parametrize(("before", "after"), [(b"3 + 3", b"3 + 4"), (b'"hops": 3', b'"hops": 4')])
def test_row_that_was_changed_while_the_file_is_used_is_an_error(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = jsonl(tmp_path)
    prompts = load_prompts(str(path), _DATA)
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(OperatorError, match=r"line 4 was changed while the run uses the file\. Put it back"):
        prompts[3]


def test_file_that_is_replaced_while_it_is_used_is_read_as_it_was(tmp_path: Path) -> None:
    path = jsonl(tmp_path)
    prompts = load_prompts(str(path), _DATA)
    (tmp_path / "new.jsonl").write_text("{}\n")
    (tmp_path / "new.jsonl").replace(path)
    assert prompts[4].label == "8"
