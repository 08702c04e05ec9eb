"""The file of answers after kills: each row once, and no line that was cut off."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from learner.data.answers import (
    Answers,
    Origin,
    Sample,
    append_answers,
    find_difference,
    read_answers,
    rows_of,
    sort_answers,
)
from learner.data.prompts import Prompt
from protocol.errors import OperatorError

_ORIGIN = Origin("w", "s")
_NUM_ROWS = 400
_WRITER = """
import sys
from pathlib import Path
from learner.data.answers import append_answers, rows_of
from tests.learner.data.test_answers import _NUM_ROWS, _ORIGIN, line, prompts
path = Path(sys.argv[1])
missing = sorted(set(range(_NUM_ROWS)) - rows_of(path, _ORIGIN, prompts()), key=lambda row: row % 7)
print("ready", flush=True)
for row in missing:
    append_answers(path, line(row))
"""


def line(row: int) -> Answers:
    sample = Sample(text="é" * 400, reward=0.5, parts={}, finish="stop", tokens=[1, 2, 3, 4], learnt=[(1, 2), (3, 4)])
    return Answers(row=row, uid=f"u{row}", prompt="p", samples=[sample] * 4, weights="w", sampled_by="s")


def prompts() -> list[Prompt]:
    return [Prompt(f"u{row}", "p", None, {}) for row in range(_NUM_ROWS)]


def test_every_row_is_there_once_after_kills_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ends = []
    for number in range(8):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.002 * number if number < 7 else 0)
            if number < 7:
                writer.kill()
            ends.append(writer.wait())
    assert ends[-1] == 0
    assert -9 in ends
    sort_answers(path)
    assert list(read_answers(path)) == [line(row) for row in range(_NUM_ROWS)]


def test_a_line_that_was_cut_off_anywhere_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    append_answers(path, line(0))
    append_answers(path, line(1))
    whole = path.read_bytes()
    size = len(whole) // 2
    for end in range(size, 2 * size, 97):
        path.write_bytes(whole[:end])
        assert rows_of(path, _ORIGIN, prompts()) == {0}
        append_answers(path, line(1))
        sort_answers(path)
        assert path.read_bytes() == whole


def test_files_of_other_prompts_or_scorers_differ_and_those_of_another_seed_or_model_do_not(tmp_path: Path) -> None:
    def written(name: str, **changes: str) -> Path:
        for row in range(2):
            append_answers(tmp_path / name, replace(line(row), **changes))
        return tmp_path / name

    first = written("first", sampled_by="s 0")
    assert find_difference(written("other round", sampled_by="s 1", weights="w2"), first) is None
    assert find_difference(written("other scorer", sampled_by="s2 1"), first) == "settings, scorers or tools"
    assert find_difference(written("other prompts", sampled_by="s 1", uid="u"), first) == "prompts"
    append_answers(written("more prompts", sampled_by="s 1"), replace(line(2), sampled_by="s 1"))
    assert find_difference(tmp_path / "more prompts", first) == "prompts"


def test_of_two_lines_of_a_row_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for each in (line(1), line(0), line(1)):
        append_answers(path, each)
    sort_answers(path)
    assert [each.row for each in read_answers(path)] == [0, 1]


def test_mask_is_one_for_the_tokens_of_the_model() -> None:
    assert line(0).samples[0].loss_mask == [0, 1, 0, 1]


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"none\.jsonl cannot be read or written: No such file"):
        list(read_answers(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("wrong", ['{"prompt": "a", "label": "b"}', '{"row": 1, "uid": "u1", "wei', ""])
def test_line_of_another_kind_and_one_that_was_cut_off_are_named(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "out.jsonl"
    append_answers(path, line(0))
    path.write_text(path.read_text() + wrong + "\n")
    with pytest.raises(OperatorError, match=r"out\.jsonl:2 is not a whole line of sluice generate\. Give its command"):
        list(read_answers(path))
