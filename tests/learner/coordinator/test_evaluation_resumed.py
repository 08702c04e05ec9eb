"""Evaluations and the next start of a run: what was begun, held back or written before it ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.settings.run_spec import SEARCH_INDEX, TOOL_LIST
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import settings_of
from tests.learner.coordinator.evaluating import (
    begin,
    evaluate,
    evaluated,
    finish,
    restart,
    scores,
    take_step,
    waits,
)


def test_a_stop_during_the_first_evaluation_leaves_it_to_the_next_start(tmp_path: Path) -> None:
    settings = evaluated(5)
    script = begin(tmp_path, settings)
    script.coordinator.stop_after_step("asked to")
    (answer,) = script.ask(1)
    assert isinstance(answer, m.RunEnd)
    resumed = restart(script, settings, step=0)
    assert waits(resumed, 1) == "waits for the evaluation of step 0: 0 of 2 prompts are back"
    evaluate(resumed, 0, 0.5)
    assert scores(resumed) == {0: (0, 0.5)}


def test_the_first_evaluation_is_made_once(tmp_path: Path) -> None:
    settings = evaluated(5)
    script = begin(tmp_path, settings)
    evaluate(script, 0, 0.5)
    resumed = restart(script, settings, step=0)
    assert {lease.kind for lease in resumed.demand()} == {"train"}
    assert [line["step"] for line in resumed.metrics()] == [0]


def test_an_evaluation_under_way_at_a_checkpoint_is_begun_again_on_its_weights(tmp_path: Path) -> None:
    settings = evaluated(4, max_steps=8)
    script = begin(tmp_path, settings)
    evaluate(script, 0, 0.0)
    for step in (1, 2, 3, 4, 5):
        take_step(script, step)
    resumed = restart(script, settings, step=5)
    evaluate(resumed, 5, 0.75)
    take_step(resumed, 6)
    assert scores(resumed) == {0: (0, 0.0), 6: (5, 0.75)}
    again = restart(resumed, settings, step=6)
    assert {lease.kind for lease in again.demand(version=6)} == {"train"}


def test_a_line_that_was_held_back_at_a_checkpoint_is_written_by_the_next_start(tmp_path: Path) -> None:
    settings = evaluated(1)
    script = begin(tmp_path, settings)
    evaluate(script, 0, 0.0)
    take_step(script, 1)
    resumed = restart(script, settings, step=1)
    assert waits(resumed, 2) == "waits for the evaluation of step 1: 0 of 2 prompts are back"
    evaluate(resumed, 1, 0.5)
    assert [(line["step"], line.get("policy/loss")) for line in resumed.metrics()] == [(0, None), (1, 0.25)]
    assert scores(resumed) == {0: (0, 0.0), 1: (1, 0.5)}


def test_a_held_first_line_is_kept_when_no_evaluation_came_before_it(tmp_path: Path) -> None:
    settings = evaluated(1)
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"before": False})})
    script = begin(tmp_path, settings)
    take_step(script, 1)
    resumed = restart(script, settings, step=1)
    evaluate(resumed, 1, 0.5)
    assert scores(resumed) == {1: (1, 0.5)}


def test_a_line_that_was_written_after_its_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    settings = evaluated(1)
    script = begin(tmp_path, settings)
    evaluate(script, 0, 0.0)
    take_step(script, 1)
    script.ledger.begin_copy(tmp_path / "checkpoint").make()
    evaluate(script, 1, 0.5)
    script.ledger.close()
    (tmp_path / "checkpoint").replace(tmp_path / "ledger.sqlite")
    resumed = begin(tmp_path, settings, step=1)
    assert {lease.kind for lease in resumed.demand(version=1)} == {"train"}
    assert scores(resumed) == {0: (0, 0.0), 1: (1, 0.5)}


def test_a_line_held_back_in_a_checkpoint_from_another_folder_is_left_there(tmp_path: Path) -> None:
    settings = evaluated(1)
    script = begin(tmp_path, settings)
    evaluate(script, 0, 0.0)
    take_step(script, 1)
    (tmp_path / "metrics.jsonl").unlink()
    resumed = restart(script, settings, step=1)
    take_step(resumed, 2)
    assert not (tmp_path / "metrics.jsonl").exists()
    evaluate(resumed, 2, 0.5)
    assert [line["step"] for line in resumed.metrics()] == [2]


def test_what_is_held_back_stands_in_the_ledger_until_it_is_written(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5))
    script.advance()
    assert json.loads(script.ledger.meta("held_line") or "")["step"] == 0
    evaluate(script, 0, 0.5)
    assert (script.ledger.meta("held_line"), script.ledger.meta("evaluating")) == ("", "")


@pytest.mark.parametrize(
    "section",
    [
        {"eval": {"every_steps": 1, "num_prompts": 1, "samples": 1}},
        {"rollout": {"temperature": 0.5}},
        {"sampling": {"stop": ["\n"]}},
    ],
)
def test_scores_of_a_set_that_a_resume_changed_name_their_first_step_in_all_later_starts(
    tmp_path: Path, section: dict[str, Any]
) -> None:
    script = begin(tmp_path, evaluated(1))
    evaluate(script, 0, 0.0)
    take_step(script, 1)
    other = Settings.model_validate(evaluated(1).model_dump() | section)
    resumed = restart(script, other, step=1)
    (notice,) = resumed.coordinator.status().notices
    assert notice.startswith("The held-out set held_out has other prompts or other sampling from step 2 on")
    again = restart(resumed, other, step=1)
    assert again.coordinator.status().notices == ()
    evaluate(again, 1, 0.5)
    assert [line.get("eval/held_out/since") for line in again.metrics()] == [None, 2.0]


@pytest.mark.parametrize("name", [TOOL_LIST, SEARCH_INDEX])
def test_scores_with_other_tools_or_another_index_are_not_compared_with_earlier_ones(tmp_path: Path, name: str) -> None:
    script = begin(tmp_path, evaluated(1), services={name: "a1"})
    evaluate(script, 0, 0.0)
    take_step(script, 1)
    script = restart(script, evaluated(1), step=1, services={name: "a1"})
    assert script.coordinator.status().notices == ()
    script = restart(script, evaluated(1), step=1, services={name: "b2"})
    scores, changed = script.coordinator.status().notices
    assert scores.startswith("The held-out set held_out has other prompts or other sampling from step 2 on")
    assert changed == f"{name} has changed since the last start: steps from 2 on use it as it is now."
    evaluate(script, 1, 0.5)
    assert [line.get("eval/held_out/since") for line in script.metrics()] == [None, 2.0]


def test_held_out_loss_of_rows_names_its_first_step_once_a_resume_measures_it_by_another_loss(tmp_path: Path) -> None:
    def given(beta: float) -> Settings:
        rows = {"objective": "dpo", "data": {"train": "rows.jsonl", "eval": "held_out.jsonl"}}
        return Settings.model_validate(
            settings_of().model_dump(exclude={"data"}) | rows | {"preference": {"beta": beta}}
        )

    script = begin(tmp_path, given(0.1))
    for step, beta in ((1, 0.1), (2, 0.2), (3, 0.2)):
        script = restart(script, given(beta), step - 1)
        said = ["The held-out set held_out has other rows or another loss from step 2 on: earlier scores do not count."]
        assert list(script.coordinator.status().notices) == (said if step == 2 else [])
        finish(script, script.demand(version=step - 1), "train", step - 1)
        script.batch(step)
        script.step(step, step, **{"eval/held_out/loss": 0.5} if step != 3 else {})
    assert [line.get("eval/held_out/since") for line in script.metrics()] == [None, 2.0, None]
