"""Parquet files as other programs write them: times in nanoseconds, broken texts, two columns of one name."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from learner.data.prompt_set import PromptSet, load_prompts
from protocol.errors import SettingsError
from protocol.settings.data import DataSettings

_NS = 1_700_000_000_123_456_789
_TIME = datetime.datetime(2023, 11, 14, 22, 13, 20, 123456)


def load(path: Path, **columns: Any) -> PromptSet:
    path.parent.mkdir(exist_ok=True)
    prompts = {"prompt": ["a?", "b?"], "label": ["1", "2"]}
    pyarrow.parquet.write_table(pyarrow.table(prompts | columns), path)
    return load_prompts(str(path), DataSettings())


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pyarrow.array([_NS, _NS], pyarrow.timestamp("ns")), _TIME),
        (pyarrow.array([_NS, _NS], pyarrow.timestamp("ns", "UTC")), _TIME.replace(tzinfo=datetime.UTC)),
        (pyarrow.array([1999, 1999], pyarrow.duration("ns")), datetime.timedelta(microseconds=1)),
        (pyarrow.array([1999, 1999], pyarrow.time64("ns")), datetime.time(0, 0, 0, 1)),
        (pyarrow.array([[_NS], []], pyarrow.list_(pyarrow.timestamp("ns"))), [_TIME]),
        (pyarrow.array([{"at": _NS}, None], pyarrow.struct({"at": pyarrow.timestamp("ns")})), {"at": _TIME}),
    ],
)
def test_times_in_nanoseconds_are_read_to_the_microsecond(
    tmp_path: Path, column: pyarrow.Array, expected: object
) -> None:
    assert load(tmp_path / "train.parquet", made=column)[0].columns == {"made": expected}


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (pyarrow.array([1, 2**60], pyarrow.timestamp("us")), "date value out of range"),
        (
            pyarrow.Array.from_buffers(
                pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")]
            ),
            "'utf-8' codec can't decode byte 0xff",
        ),
    ],
)
def test_row_with_a_value_that_python_cannot_hold_is_named(tmp_path: Path, column: pyarrow.Array, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"train.parquet row 2 cannot be read: {problem}"):
        load(tmp_path / "train.parquet", made=column)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    columns = [pyarrow.array(["a?"]), pyarrow.array(["1"]), pyarrow.array(["2"])]
    pyarrow.parquet.write_table(pyarrow.table(columns, names=["prompt", "label", "label"]), path)
    with pytest.raises(SettingsError, match="has two columns 'label'"):
        load_prompts(str(path), DataSettings())


def test_folder_s_name_is_no_column_and_capitals_are_a_parquet_file_too(tmp_path: Path) -> None:
    prompts = load(tmp_path / "split=train" / "rows.PARQUET")
    assert [prompt.columns for prompt in prompts] == [{}, {}]


def test_prompt_with_a_call_and_no_text_is_the_one_of_jsonl(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    prompt = [
        {"role": "user", "content": "a?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_calls": None},
    ]
    rows = [{"prompt": prompt, "label": "1"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (found,) = load_prompts(str(tmp_path / "train.parquet"), DataSettings())
    expected = [{name: each for name, each in turn.items() if name != "tool_calls" or each} for turn in prompt]
    assert found.prompt == expected
