"""Answers to a file's prompts, written as they come back: by row, resumed, and never of two models."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from learner.coordinator.groups.eval_scores import HeldOutSet
from learner.coordinator.groups.written_answers import WrittenAnswers
from learner.data.answers import Origin, read_answers, sort_answers
from learner.data.prompts import Prompt
from learner.data.text_decoder import TextDecoder
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, prompts
from tests.learner.coordinator.evaluating import evaluated, waits

_ORIGIN = Origin("w1", "s1")


def _begin(folder: Path, asked: Sequence[Prompt], start: str = "first", num_open: int = 100) -> Script:
    """Return a start of a run that writes two samples of each prompt."""
    (folder / start).mkdir()
    settings = Settings.model_validate(evaluated(1, max_steps=0).model_dump())
    answers = WrittenAnswers(folder / "out.jsonl", _ORIGIN, HeldOutSet(asked, 2), TextDecoder(), "tools", num_open)
    return Script(folder / start, settings, num_prompts=0, num_held_out=1, answers=answers)


def test_a_prompt_that_is_back_is_a_line_with_all_its_samples(tmp_path: Path) -> None:
    script = _begin(tmp_path, prompts(2, "h"))
    first, second = script.demand()
    assert (first.sample_indices, first.greedy_indices) == ([0, 1], [])
    for index, reward in ((1, 0.25), (0, 1.0)):
        script.deliver("s1", first, index, reward=reward)
    assert waits(script, 1) == "waits for the answers to its prompts: 1/2 are back"
    (line,) = read_answers(tmp_path / "out.jsonl")
    assert (line.row, line.uid, line.prompt, line.label, line.failed) == (0, "h0", "question 0", "answer 0", None)
    assert line.besides == "tools"
    assert (line.weights, line.sampled_by) == _ORIGIN
    assert [(each.reward, each.learnt, len(each.tokens)) for each in line.samples] == [
        (1.0, [(2, 4)], 4),
        (0.25, [(2, 4)], 4),
    ]
    script.finish("s1", second)
    assert isinstance(script.ask(1)[0], m.RunEnd)


def test_a_later_start_samples_missing_and_new_rows_alone_and_the_file_ends_in_order(tmp_path: Path) -> None:
    asked = prompts(3, "h")
    script = _begin(tmp_path, asked[:2])
    script.finish("s1", script.demand()[1])
    again = _begin(tmp_path, asked, "again")
    leases = again.demand()
    assert [lease.prompt for lease in leases] == ["question 0", "question 2"]
    for lease in reversed(leases):
        again.finish("s1", lease)
    assert isinstance(again.ask(1)[0], m.RunEnd)
    sort_answers(tmp_path / "out.jsonl")
    assert [line.row for line in read_answers(tmp_path / "out.jsonl")] == [0, 1, 2]
    assert isinstance(_begin(tmp_path, asked, "third").ask(1)[0], m.RunEnd)


def test_prompts_of_equal_text_have_a_row_each(tmp_path: Path) -> None:
    asked = [Prompt(f"h{i}", "the same", "label", {}) for i in range(2)]
    script = _begin(tmp_path, asked)
    script.demand_and_finish()
    assert [(line.row, line.uid) for line in read_answers(tmp_path / "out.jsonl")] == [(0, "h0"), (1, "h1")]


def test_a_prompt_that_failed_has_a_line_with_the_reason_and_its_other_samples(tmp_path: Path) -> None:
    script = _begin(tmp_path, prompts(1, "h"))
    (lease,) = script.demand()
    script.deliver("s1", lease, 0)
    for _ in range(2):
        script.fail("s1", lease, 1)
        (lease,) = script.demand()
    script.fail("s1", lease, 1)
    (line,) = read_answers(tmp_path / "out.jsonl")
    assert len(line.samples) == 1
    assert "reward:em: 503" in str(line.failed)
    assert script.ask(1)
    assert script.metrics()[0]["eval/failed"] == 1


def test_more_prompts_than_are_open_at_once_are_all_written(tmp_path: Path) -> None:
    script = _begin(tmp_path, prompts(11, "h"), num_open=4)
    leases = script.demand()
    assert len(leases) == 4
    while leases:
        for lease in leases:
            script.finish("s1", lease)
        leases = script.demand()
    assert [line.row for line in read_answers(tmp_path / "out.jsonl")] == list(range(11))


@pytest.mark.parametrize(
    ("origin", "asked", "problem"),
    [
        (Origin("w2", "s1"), prompts(2, "h"), "another model, tokenizer or template, in the line of row 0"),
        (Origin("w1", "s2"), prompts(2, "h"), "other settings, in the line of row 0"),
        (_ORIGIN, prompts(2, "g"), "other prompts, in the line of row 0"),
        (_ORIGIN, [], "other prompts, in the line of row 0"),
    ],
)
def test_answers_of_something_else_are_refused(
    tmp_path: Path, origin: Origin, asked: list[Prompt], problem: str
) -> None:
    script = _begin(tmp_path, prompts(2, "h"))
    script.finish("s1", script.demand()[0])
    with pytest.raises(OperatorError, match=problem):
        WrittenAnswers(tmp_path / "out.jsonl", origin, HeldOutSet(asked, 2), TextDecoder())
