"""Files as strangers bring them: of another form, with other line ends, with rows of other types."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from learner.data.prompt_reading import read_prompts
from learner.data.prompt_set import load_prompts
from learner.data.prompts import MAX_ROW_BYTES
from protocol.errors import SettingsError
from protocol.settings.data import DataSettings

_ROW = b'{"prompt": "a?", "label": "A"}'
_DATA = DataSettings()


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return path


def prompts(path: Path) -> list[Any]:
    return [prompt.prompt for prompt in load_prompts(str(path), _DATA)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no rows. A run needs at least one prompt."),
        (b"\n \r\n\n", "has no rows. A run needs at least one prompt."),
        (gzip.compress(_ROW), "is packed with gzip. Give JSONL, one object on each line, or Parquet."),
        (b"[\n" + _ROW + b"\n]\n", "is one JSON list. Give JSONL"),
        (b"[" + _ROW + b"]\n", "is one JSON list. Give JSONL"),
        (_ROW.decode().encode("utf-16"), "is UTF-16. Give JSONL"),
        (b"version https://git-lfs.github.com/spec/v1\noid x\n", "is a pointer of Git LFS"),
        (b"prompt,label\na?,A\n", "line 1 is not JSON: Expecting value at column 1. Give JSONL,"),
        (_ROW + b"\n" + _ROW[:12], "line 2 is not JSON: Unterminated string"),
        (_ROW + b"\n[1]", "line 2 is a list, expected an object."),
        (_ROW + b'\n{"prompt": "\xff"}', "line 2 is not UTF-8: invalid start byte."),
        (
            b'{"prompt": "a?", "label": 18446744073709551616}',
            "line 1 holds a value that cannot be sent: can't",
        ),
        (
            _ROW + b"\n" + b'{"prompt": 7, "label": "A"}',
            "line 2 has prompt = 7, expected text or a list",
        ),
        (_ROW + b'\n{"prompt": "a?", "label": NaN}', "line 2 has label = nan, which JSON cannot send"),
        (b'{"prompt": "a?", "label": [1, -Infinity]}', "line 1 has label = [1, -inf], which JSON cannot send"),
        (b'{"prompt": NaN, "label": "A"}', "line 1 has prompt = nan, expected text"),
        (b'{"text": "a?", "label": "A"}', "line 1 has prompt = None, expected text"),
        (
            b'{"prompt": "a?", "label": null}',
            "line 1 has no label under 'label'. Set data.label_key to one of ['label', 'prompt'], or "
            "data.label_required to false when your reward needs none.",
        ),
        (b'{"prompt": "\\ud800", "label": "A"}', "line 1 holds a value that cannot be sent"),
    ],
)
def test_file_that_is_no_rows_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(SettingsError) as caught:
        load_prompts(str(path), _DATA)
    assert str(caught.value).startswith(f"data: {path} {says}")


def test_lines_may_end_as_on_windows_and_the_last_one_not_at_all(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + _ROW + b"\r\n\r\n" + _ROW.replace(b"a?", b"b?"))
    assert prompts(path) == ["a?", "b?"]


def test_line_separators_inside_a_text_end_no_row(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x0bd"
    path = write(tmp_path, json.dumps({"prompt": text, "label": ""}, ensure_ascii=False).encode() + b"\n")
    assert prompts(path) == [text]


def test_brackets_inside_texts_do_not_make_a_row_too_deep(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"prompt": "{[" * 100, "label": {"a": [["]"]]}}).encode())
    assert prompts(path) == ["{[" * 100]


def test_labels_of_several_types_stand_beside_each_other(tmp_path: Path) -> None:
    labels: list[Any] = ["A", 7, 0.5, ["a", "b"], {"target": ["x"]}, True]
    path = write(tmp_path, b"".join(json.dumps({"prompt": "a?", "label": label}).encode() + b"\n" for label in labels))
    assert [prompt.label for prompt in load_prompts(str(path), _DATA)] == labels


def test_huge_row_is_left_out_and_its_neighbours_are_used(tmp_path: Path) -> None:
    path = write(tmp_path, _ROW + b'\n{"prompt": "' + b"x" * (2 * MAX_ROW_BYTES) + b'", "label": ""}\n' + _ROW + b"\n")
    index, unusable = read_prompts(str(path), _DATA)
    assert index.numbers.tolist() == [1, 3]
    assert [one.row.number for one in unusable] == [2]


def test_missing_values_of_a_parquet_file_are_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": "a?", "label": "A", "score": math.nan}, {"prompt": None, "label": "B", "score": 1.0}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(SettingsError, match=r"rows\.parquet line 2 has prompt = None, expected text"):
        load_prompts(str(path), _DATA)


def test_file_whose_name_is_of_the_other_form_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a?", "label": "A"}]), path)
    with pytest.raises(SettingsError, match=r"is a Parquet file that is not called \.parquet"):
        load_prompts(str(path), _DATA)
    with pytest.raises(SettingsError, match=r"rows\.parquet is not a Parquet file: "):
        load_prompts(str(write(tmp_path, _ROW).rename(tmp_path / "rows.parquet")), _DATA)


def test_parquet_file_without_a_row_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, path)
    with pytest.raises(SettingsError, match="has no rows"):
        load_prompts(str(path), _DATA)
