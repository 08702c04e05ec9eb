"""Rows from answers: by mode and objective, readable by the objective that they are for."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.data.answers import Answers, Sample, append_answers
from learner.data.sft_rows import RowEncoder
from learner.generation import select
from protocol.errors import OperatorError, SettingsError
from tests.fakes.tiny_models import make_tiny_model

_BY_ROW = [[0.0, 1.0, 1.0, 0.5], [0.5, 0.5], [0.0, 0.25], []]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Return a file of four prompts with equal text. A sample's last two tokens are of its row and its number."""
    path = tmp_path / "answers.jsonl"
    for row, rewards in enumerate(_BY_ROW):
        samples = [_sample(reward, [5, 6, 10 * row + 20, number + 10]) for number, reward in enumerate(rewards)]
        append_answers(path, _answers(row, samples))
    return path


def _sample(reward: float, tokens: list[int], **changes: Any) -> Sample:
    given = {"text": f"t{tokens[-1]}", "finish": "stop", "learnt": [(2, len(tokens))], **changes}
    return Sample(reward=reward, parts={}, tokens=tokens, **given)


def _answers(row: int, samples: list[Sample], prompt: Any = "ask") -> Answers:
    return Answers(row=row, uid=f"u{row}", prompt=prompt, samples=samples, weights="w", sampled_by="s")


def _select(answers: Path, *options: str) -> list[dict[str, Any]]:
    rows = answers.with_name("rows.jsonl")
    assert select.main([str(answers), str(rows), *options]) == 0
    return [json.loads(line) for line in rows.read_text().splitlines()]


def _ids(rows: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    return [(row["row"], row["input_ids"][2:]) for row in rows]


def test_best_is_the_first_of_the_highest_reward_of_each_row(
    answers: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _select(answers)
    assert _ids(rows) == [(0, [20, 11]), (1, [30, 10]), (2, [40, 11])]
    assert capsys.readouterr().out == "3 rows, 1 prompts without a sample to use\n"
    (row,) = RowEncoder(model).encode(rows[0])
    assert (row.tokens.tolist(), row.weights.tolist()) == ([5, 6, 20, 11], [0, 0, 1, 1])


def test_best_below_the_least_reward_is_left_out(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _ids(_select(answers, "--at-least", "0.5")) == [(0, [20, 11]), (1, [30, 10])]
    assert "1 prompts with every reward below --at-least" in capsys.readouterr().out


def test_pairs_are_of_unequal_rewards(answers: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _select(answers, "--select", "best_worst")
    assert [(row["row"], row["chosen"]["input_ids"][3], row["rejected"]["input_ids"][3]) for row in rows] == [
        (0, 11, 10),
        (2, 11, 10),
    ]
    assert "1 prompts with equal rewards" in capsys.readouterr().out
    chosen, rejected = RowEncoder(model, "preferences").encode(rows[0])
    assert (chosen.tokens.tolist(), rejected.tokens.tolist()) == ([5, 6, 20, 11], [5, 6, 20, 10])
    assert chosen.weights.tolist() == rejected.weights.tolist() == [0, 0, 1, 1]


def test_best_and_worst_are_labelled_for_kto(answers: Path, model: Path) -> None:
    rows = _select(answers, "--select", "best_worst", "--for", "kto")
    assert [(row["row"], row["label"]) for row in rows] == [(0, True), (0, False), (2, True), (2, False)]
    (row,) = RowEncoder(model, "unpaired").encode(rows[1])
    assert (row.tokens.tolist(), row.reward) == ([5, 6, 20, 10], -1.0)


def test_threshold_keeps_the_good_samples_or_labels_all(answers: Path) -> None:
    chosen = ["--select", "threshold", "--at-least", "0.5"]
    assert _ids(_select(answers, *chosen)) == [
        (0, [20, 11]),
        (0, [20, 12]),
        (0, [20, 13]),
        (1, [30, 10]),
        (1, [30, 11]),
    ]
    labels = [row["label"] for row in _select(answers, *chosen, "--for", "kto")]
    assert labels == [False, True, True, True, True, True, False, False]


def test_text_is_learnt_as_prompt_and_completion(answers: Path) -> None:
    rows = _select(answers, "--text")
    assert rows[0] == {"row": 0, "reward": 1.0, "prompt": "ask", "completion": "t11"}
    (pair, _) = _select(answers, "--text", "--select", "best_worst")
    assert pair == {"row": 0, "prompt": "ask", "chosen": "t11", "rejected": "t10"}


def test_tag_tells_the_model_each_answers_reward(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, _answers(0, [_sample(0.5, [1, 2, 3]), _sample(1.0, [1, 2, 4])]))
    parts = [{"type": "text", "text": each} for each in ("as", "k")]
    append_answers(path, _answers(1, [_sample(0.0, [1, 2, 3])], [{"role": "user", "content": parts}]))
    rows = _select(path, "--select", "all", "--text", "--tag", " <score>: {reward} ")
    assert [row["prompt"] for row in rows] == [
        "ask <score>: 0.50 ",
        "ask <score>: 1.00 ",
        [{"role": "user", "content": "ask <score>: 0.00 "}],
    ]


def test_answers_that_a_limit_cut_off_are_no_text_to_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, _answers(0, [_sample(1.0, [1, 2, 3], finish="length"), _sample(0.0, [1, 2, 4])]))
    assert [row["completion"] for row in _select(path, "--text")] == ["t4"]
    assert "1 samples that a limit cut off" in capsys.readouterr().out
    assert _ids(_select(path)) == [(0, [3])]


def test_conversation_of_several_turns_is_learnt_as_tokens_alone(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, _answers(0, [_sample(1.0, [1, 2, 3, 4, 5], learnt=[(2, 3), (4, 5)])]))
    assert _select(path)[0]["loss_mask"] == [0, 0, 1, 0, 1]
    with pytest.raises(OperatorError, match=r"Row 0 has a conversation of several turns. Leave --text out\."):
        _select(path, "--text")


def test_answers_to_more_than_the_prompt_are_learnt_as_tokens_alone(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    line = msgspec.structs.replace(_answers(0, [_sample(1.0, [1, 2, 3])]), besides="rollout.environment = tools")
    append_answers(path, line)
    assert _ids(_select(path)) == [(0, [3])]
    with pytest.raises(
        OperatorError, match=r"Row 0 was sampled with rollout\.environment = tools, .* Leave --text out"
    ):
        _select(path, "--text")


def test_rows_never_replace_the_answers(answers: Path) -> None:
    before = answers.read_bytes()
    with pytest.raises(OperatorError, match="is the file of the answers"):
        select.main([str(answers), str(answers)])
    assert answers.read_bytes() == before


def test_no_row_at_all_is_an_error_that_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    append_answers(path, _answers(0, [_sample(0.0, [1, 2, 3])]))
    with pytest.raises(OperatorError, match=r"No row of .*: 0 rows, 1 prompts with equal rewards\. Select others"):
        _select(path, "--select", "best_worst")
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--select", "best", "--for", "dpo"], "--select best makes rows for sft, not for dpo"),
        (["--select", "threshold"], "--select threshold needs the threshold"),
        (["--tag", "x"], "--tag is for rows of text for sft"),
    ],
)
def test_selection_that_contradicts_itself_is_refused(answers: Path, options: list[str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        _select(answers, *options)


def test_samples_after_different_prompts_make_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    for row, first in enumerate((5, 7)):
        append_answers(path, _answers(row, [_sample(1.0, [5, 6, 20, 10]), _sample(0.0, [first, 6, 20, 11])]))
    assert [row["row"] for row in _select(path, "--select", "best_worst", "--for", "dpo")] == [0]
    assert "1 rows, 1 prompts that the environment wrote otherwise" in capsys.readouterr().out
