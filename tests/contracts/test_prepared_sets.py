"""gsm8k, MATH and NQ as their files come -> prepared -> loaded -> a lease -> a reward by the scorer that is named."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from learner.data.prepare.command import main
from learner.data.prepare.sets import KNOWN_SETS, last_boxed
from learner.data.prompt_set import load_prompts
from protocol.settings.data import DataSettings
from protocol.wire.codec import Decoder, encode
from protocol.wire.messages import Lease, Message, ToServer
from rewards.bundled import scorer_named
from rewards.sample import make_sample

# Rows as the sets' files have them, and a response that is right.
_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k": (
        {"question": "Ada sold 1,200 pens and then 40. How many?", "answer": "It is <<1200+40=1240>>1240.\n#### 1,240"},
        "1,200 and 40 more.\n#### 1240",
    ),
    "math": (
        {"problem": "What is $1/4 + 1/4$?", "level": "Level 1", "type": "Algebra",
         "solution": "Not \\boxed{3}: it is $\\boxed{\\frac{1}{2}}$."},
        "It is \\boxed{0.5}",
    ),
    "nq_search": (
        {"id": "train_0", "question": "who wrote the iliad", "golden_answers": ["Homer", "Homeros"]},
        "<search> iliad </search><answer> homeros. </answer>",
    ),
}  # fmt: skip
_CHAT = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
_TEXTS = pyarrow.struct([("target", pyarrow.list_(pyarrow.string()))])


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def prepared(tmp_path: Path, name: str) -> Path:
    write(tmp_path / "own" / "train-00000-of-00001.parquet", _ROWS[name][0], _ROWS[name][0])
    write(tmp_path / "own" / "test-00000-of-00001.parquet", _ROWS[name][0])
    assert main([name, "--from", str(tmp_path / "own"), "--to", str(tmp_path / "to")]) == 0
    return tmp_path / "to"


@pytest.mark.parametrize("name", _ROWS)
def test_prepared_rows_have_the_columns_of_verl(tmp_path: Path, name: str) -> None:
    folder = prepared(tmp_path, name)
    extra = {"split": pyarrow.string(), "index": pyarrow.int64()}
    extra |= {"answer": pyarrow.string(), "question": pyarrow.string()} if name == "gsm8k" else {}
    truth = _TEXTS if name == "nq_search" else pyarrow.string()
    schema = pyarrow.parquet.read_schema(folder / "train.parquet")
    assert {field.name: field.type for field in schema} == {
        "data_source": pyarrow.string(),
        "prompt": _CHAT,
        "ability": pyarrow.string(),
        "reward_model": pyarrow.struct([("style", pyarrow.string()), ("ground_truth", truth)]),
        "extra_info": pyarrow.struct(list(extra.items())),
    }
    rows = pyarrow.parquet.ParquetFile(folder / "train.parquet").read().to_pylist()
    assert [(row["extra_info"]["split"], row["extra_info"]["index"]) for row in rows] == [("train", 0), ("train", 1)]
    assert {row["data_source"] for row in rows} == {KNOWN_SETS[name].data_source}
    (test,) = pyarrow.parquet.ParquetFile(folder / "test.parquet").read().to_pylist()
    assert test["extra_info"]["split"] == "test"
    assert test["prompt"][0]["role"] == "user"


@pytest.mark.parametrize("name", _ROWS)
def test_prepared_row_is_leased_and_scored(tmp_path: Path, name: str) -> None:
    prompt = load_prompts(str(prepared(tmp_path, name) / "train.parquet"), DataSettings())[1]
    lease = Lease(
        run_id="r", incarnation=1, number=1, group="e0-a", attempt=1, kind="train", prompt=prompt.prompt,
        label=prompt.label, columns=prompt.columns, sample_indices=[0], greedy_indices=[], seed=1,
    )  # fmt: skip
    decoder: Decoder[Message] = Decoder(ToServer)
    arrived, _ = decoder.decode(encode(lease))
    assert isinstance(arrived, Lease)
    asked = str(prompt.prompt)
    samples = [
        make_sample(asked + response, asked, arrived.label, arrived.columns)
        for response in (_ROWS[name][1], "It is \\boxed{7} <answer> Virgil </answer>")
    ]
    scores = asyncio.run(scorer_named(KNOWN_SETS[name].scorer)(samples))
    assert [score.reward for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        (
            "gsm8k",
            {"question": "a?", "answer": "It is 4."},
            "line 1 has no number after #### in its answer: 'It is 4.'.",
        ),
        *(
            (
                "gsm8k",
                {"question": "a?", "answer": f"#### {half}"},
                f"line 1 has no number after #### in its answer: '#### {half}'.",
            )
            for half in ("3/4", "10:30", "5 1/2", "12/5")
        ),
        (
            "math",
            {"problem": "a?", "solution": "\\boxed{}"},
            "line 1 has no \\boxed{} in its solution: '\\\\boxed{}'.",
        ),
        ("math", {"problem": "a?", "solution": "It is 4."}, "line 1 has no \\boxed{} in its solution: 'It is 4.'."),
        (
            "math",
            {"problem": "\ud83d?", "solution": "\\boxed{4}"},
            "line 1 has '\\ud83d', half of a character. Remove it or write it whole.",
        ),
        ("math", {"question": "a?"}, "line 1 has problem = None, expected text. Its columns are ['question']."),
        (
            "nq_search",
            {"question": "a", "golden_answers": []},
            "line 1 has golden_answers = [], expected a list of texts.",
        ),
    ],
)
def test_row_of_another_set_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, row: dict[str, Any], says: str
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert main([name, "--from", str(path), "--to", str(tmp_path / "to")]) == 2
    assert capsys.readouterr().err.startswith(f"data: {path} {says}")
    assert list((tmp_path / "to").iterdir()) == []


def test_repeated_file_and_folder_that_is_a_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path / "train.parquet", _ROWS["gsm8k"][0]))
    assert main(["gsm8k", "--from", path, path, "--to", str(tmp_path / "to")]) == 2
    assert main(["gsm8k", "--from", path, "--to", path]) == 2
    assert re.search("is named twice.*\n.* cannot be written: File exists", capsys.readouterr().err)


def test_file_whose_name_says_no_split_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "own" / "0000.parquet", _ROWS["gsm8k"][0])
    assert main(["gsm8k", "--from", str(path), "--to", str(tmp_path / "to")]) == 2
    assert "Say it with --split." in capsys.readouterr().err
    assert main(["gsm8k", "--from", str(path), "--to", str(tmp_path / "to"), "--split", "dev"]) == 0
    assert (tmp_path / "to" / "dev.parquet").is_file()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1}, then \\fbox{2}", "2"),
        ("\\boxed{\\left[0, 1\\right\\}}", "\\left[0, 1\\right\\}"),
        ("$\\boxed 5$", "5"),
        ("\\boxed{{1}", None),
        ("none", None),
    ],
)
def test_last_box_is_read_with_its_braces(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_command_names_the_training_and_the_held_out_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepared(tmp_path, "gsm8k")
    assert f"Use --data.train {folder}/train.parquet --data.eval {folder}/test.parquet; their labels" in (
        capsys.readouterr().out
    )
