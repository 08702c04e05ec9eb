"""Evaluations beside training: leased first, reported on a step's line, waited for where they have to be."""

import json
import time
from pathlib import Path

import msgspec
import pytest

from learner.coordinator.groups.eval_scores import HeldOutSet
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, prompts
from tests.learner.coordinator.evaluating import begin, evaluate, evaluated, finish, scores, take_step, waits

# -- before the first step --------------------------------------------------------------------------------------------


def test_evaluation_is_leased_before_training_and_takes_no_slot(tmp_path: Path) -> None:
    leases = begin(tmp_path, evaluated(1)).demand()
    assert [lease.kind for lease in leases] == ["eval", "eval", "train", "train", "train", "train"]
    assert [(lease.sample_indices, lease.greedy_indices) for lease in leases[:2]] == [([0, 1], [1])] * 2


def test_every_rank_waits_for_the_first_evaluation_and_none_for_another_rank(tmp_path: Path) -> None:
    """Rank 1 once got its share of step 1, and waited in a collective for rank 0, which waited for the evaluation."""
    settings = evaluated(1, learner={"num_ranks": 2, "groups_per_step": 2, "max_staleness": 1})
    script = begin(tmp_path, settings)
    leases = script.demand()
    finish(script, leases, "train", 0)
    for rank in (0, 1):
        assert waits(script, 1, rank) == "waits for the evaluation of step 0: 0 of 2 prompts are back"
    finish(script, leases, "eval", 0)
    assert script.batch(1, rank=0).step == script.batch(1, rank=1).step == 1


def test_first_evaluation_has_a_line_of_its_own(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5))
    first, second, *_ = script.demand()
    for index, reward in enumerate((1.0, 0.0)):
        script.deliver("s1", first, index, reward=reward)
    assert not (tmp_path / "metrics.jsonl").exists()
    time.sleep(0.01)
    nearly_done_at = time.time()
    script.finish("s1", second, reward=0.5)
    (line,) = script.metrics()
    assert line["at_s"] > nearly_done_at - 0.002
    assert (line["step"], line["policy_version"], line["eval/policy_version"], line["eval/failed"]) == (0, 0, 0, 0)
    assert (line["eval/held_out/reward"], line["eval/held_out/greedy"]) == (0.75, 0.25)


def test_a_run_of_no_steps_ends_when_its_evaluation_is_done(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5, max_steps=0))
    assert waits(script, 1) == "waits for the evaluation of step 0: 0 of 2 prompts are back"
    evaluate(script, 0, 0.5)
    (answer,) = script.ask(1)
    assert isinstance(answer, m.RunEnd)
    assert scores(script) == {0: (0, 0.5)}


def test_a_run_without_evaluations_has_no_line_before_its_first_step(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(0))
    take_step(script, 1)
    assert [line["step"] for line in script.metrics()] == [1]
    assert {lease.kind for lease in script.demand(version=1)} == {"train"}


def test_evaluation_ends_without_a_prompt_that_failed_three_times(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5))
    lease, other = script.demand(num_groups=2)
    for _ in range(2):
        script.fail("s1", lease, 0)
        (lease,) = script.demand(num_groups=1)
        assert lease.kind == "eval"
    script.fail("s1", lease, 0)
    script.finish("s1", other, reward=1.0)
    (line,) = script.metrics()
    assert (line["eval/failed"], line["eval/held_out/reward"], line["eval/held_out/greedy"]) == (1, 1.0, 1.0)


def test_ranks_that_wait_for_an_evaluation_push_again_when_the_only_server_is_back(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5))
    script.tell("s1", m.Hello(**script.stamp, server="s1", policy_version=None))
    script.advance()
    assert waits(script, 1) == "waits for the evaluation of step 0: 0 of 2 prompts are back"
    script.advance(2.0)
    assert script.ask(1) == [m.PushAgain(**script.stamp, step=1)]
    assert script.ask(1) == []  # that push is given its time


# -- beside training --------------------------------------------------------------------------------------------------


def test_an_evaluation_beside_training_is_on_the_line_of_the_step_that_ends_next(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(4, max_steps=8))
    evaluate(script, 0, 0.0)
    for step in (1, 2, 3, 4):
        take_step(script, step)
    evaluate(script, 4, 0.25)
    take_step(script, 5)
    assert scores(script) == {0: (0, 0.0), 5: (4, 0.25)}


def test_no_step_begins_that_would_overtake_an_evaluation(tmp_path: Path) -> None:
    """Of two evaluations under way one was never reported, or never begun."""
    script = begin(tmp_path, evaluated(3, max_steps=8))
    evaluate(script, 0, 0.0)
    for step in (1, 2, 3):
        take_step(script, step)
    leases = take_step(script, 4)
    take_step(script, 5)
    assert [line["step"] for line in script.metrics()] == [0, 1, 2, 3, 4]
    assert waits(script, 6) == "waits for the evaluation of step 3: 0 of 2 prompts are back"
    finish(script, leases, "eval", 3, 0.5)
    script.advance()
    assert scores(script) == {0: (0, 0.0), 5: (3, 0.5)}


@pytest.mark.parametrize(("every_steps", "expected"), [(1, [0, 1, 2, 3]), (2, [0, 2, 3]), (9, [0, 3])])
def test_every_evaluation_that_is_due_is_reported_once(tmp_path: Path, every_steps: int, expected: list[int]) -> None:
    script = begin(tmp_path, evaluated(every_steps))
    for step in range(4):
        if step in expected:
            evaluate(script, step, step / 4)
        if step < 3:
            take_step(script, step + 1)
    (answer,) = script.ask(4)
    assert isinstance(answer, m.RunEnd)
    assert [line["step"] for line in script.metrics()] == [0, 1, 2, 3]
    assert scores(script) == {step: (step, step / 4) for step in expected}


def test_the_end_waits_for_the_last_evaluation_though_a_stop_was_asked_for(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5, max_steps=1))
    evaluate(script, 0, 0.0)
    take_step(script, 1)
    script.coordinator.stop_after_step("asked to")
    assert waits(script, 2) == "waits for the evaluation of step 1: 0 of 2 prompts are back"
    evaluate(script, 1, 1.0)
    (answer,) = script.ask(2)
    assert isinstance(answer, m.RunEnd)
    assert scores(script) == {0: (0, 0.0), 1: (1, 1.0)}


# -- sets, answers, pinned --------------------------------------------------------------------------------------------


def test_other_sets_are_leased_at_their_temperature_and_have_figures_and_answers(tmp_path: Path) -> None:
    aime = HeldOutSet(prompts(2, "a"), 2, name="aime", temperature=0.5)
    script = Script(tmp_path, evaluated(5), num_prompts=80, num_held_out=3, more_sets=[aime])
    leases = [lease for lease in script.demand() if lease.kind == "eval"]
    temperatures = [lease.temperature for lease in leases]
    assert temperatures == [msgspec.UNSET, msgspec.UNSET, 0.5, 0.5]
    for lease in leases:
        for index in lease.sample_indices:
            answer = "" if lease.temperature == 0.5 and index == 1 else "x"  # a sample without an answer has no vote
            script.deliver("s1", lease, index, reward=float(lease.temperature == 0.5 and bool(answer)), answer=answer)
    (line,) = script.metrics()
    assert (line["eval/held_out/reward"], line["eval/aime/reward"], line["eval/aime/majority@2"]) == (0.0, 0.5, 1.0)
    answers = [json.loads(text) for text in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(answer["set"], answer["uid"], answer["sample"]) for answer in answers] == [
        *(("held_out", f"h{i}", index) for i in range(2) for index in range(2)),
        *(("aime", f"a{i}", index) for i in range(2) for index in range(3)),
    ]
    assert {(answer["oldest_version"], answer["newest_version"]) for answer in answers} == {(0, 0)}


def test_no_step_begins_during_a_pinned_evaluation_and_all_answers_are_of_its_version(tmp_path: Path) -> None:
    settings = evaluated(2, max_steps=6)
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"pin": True})})
    script = begin(tmp_path, settings)
    evaluate(script, 0, 0.5)
    take_step(script, 1)
    take_step(script, 2)
    leases = script.demand(version=2)
    finish(script, leases, "train", 2)
    assert waits(script, 3) == "waits for the evaluation of step 2: 0 of 2 prompts are back"
    finish(script, leases, "eval", 2)
    script.batch(3)
    line = script.metrics()[-1]
    assert (line["step"], line["eval/step"], line["eval/version_min"], line["eval/version_max"]) == (2, 2, 2, 2)
