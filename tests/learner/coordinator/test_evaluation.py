"""Evaluations beside training: leased first, reported on a step's line, waited for where they have to be."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.coordinator.groups.held_out import HeldOutSet
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from tests.learner.coordinator.coordinator_script import Script, prompts, settings_of


def evaluated(every_steps: int, max_steps: int = 3, **sections: dict[str, Any]) -> Settings:
    """Return settings of evaluations of two prompts with one sampled and one greedy trajectory each."""
    evaluation = {"every_steps": every_steps, "num_prompts": 2, "samples": 1}
    sections = {"run": {"max_steps": max_steps}, "data": {"eval": "held_out.jsonl"}} | sections
    return settings_of(eval=evaluation, **sections)


def begin(folder: Path, settings: Settings, step: int = 0) -> Script:
    return Script(folder, settings, num_prompts=80, num_held_out=3, step=step)


def restart(script: Script, settings: Settings, step: int) -> Script:
    script.advance()
    script.ledger.close()
    return begin(script.folder, settings, step)


def finish(script: Script, leases: list[m.Lease], kind: str, version: int, reward: float = 0.5) -> None:
    for lease in leases:
        if lease.kind == kind:
            assert set(script.finish("s1", lease, version, reward)) == {"accepted"}


def take_step(script: Script, step: int) -> list[m.Lease]:
    """Take a step without delivering any evaluation; returns the evaluation's leases that went out meanwhile."""
    leases = script.demand(version=step - 1)
    finish(script, leases, "train", step - 1)
    script.batch(step)
    script.step(step, version=step)
    return [lease for lease in leases if lease.kind == "eval"]


def evaluate(script: Script, step: int, reward: float) -> None:
    """Have the evaluation of a step leased and delivered."""
    leases = script.demand(version=step)
    assert {lease.group.split("-")[1] for lease in leases if lease.kind == "eval"} == {str(step)}
    finish(script, leases, "eval", step, reward)
    finish(script, leases, "train", step)
    script.advance()


def scores(script: Script) -> dict[int, tuple[int, float]]:
    """Return, by the step of the line that has it, each evaluation's policy version and mean reward."""
    return {
        line["step"]: (line["eval_policy_version"], line["eval_reward"])
        for line in script.metrics()
        if "eval_reward" in line
    }


def waits(script: Script, step: int, rank: int = 0) -> str:
    """Have a rank ask for a step that an evaluation holds back; returns what it is told to wait for."""
    assert script.ask(step, rank) == []
    script.advance(1.1)
    (answer,) = script.take(f"rank-{rank}", m.Message)
    assert isinstance(answer, m.Wait), answer
    assert answer.is_for_evaluation is True
    return answer.detail


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
    assert (line["step"], line["policy_version"], line["eval_policy_version"], line["eval_failed"]) == (0, 0, 0, 0)
    assert (line["eval_reward"], line["eval_reward_greedy"]) == (0.75, 0.25)


def test_a_run_of_no_steps_ends_when_its_evaluation_is_done(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5, max_steps=0))
    assert waits(script, 1) == "waits for the evaluation of step 0: 0 of 2 prompts are back"
    evaluate(script, 0, 0.5)
    (answer,) = script.ask(1)
    assert isinstance(answer, m.Ended)
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
    assert (line["eval_failed"], line["eval_reward"], line["eval_reward_greedy"]) == (1, 1.0, 1.0)


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
    assert isinstance(answer, m.Ended)
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
    assert isinstance(answer, m.Ended)
    assert scores(script) == {0: (0, 0.0), 1: (1, 1.0)}


def test_evaluation_lease_of_a_silent_server_goes_out_again(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5))
    leases = script.demand("s1", num_groups=2)
    script.advance(101.0)
    assert [lease.group for lease in script.demand("s2", num_groups=2)] == [lease.group for lease in leases]


def test_evaluation_group_that_came_back_late_is_not_leased_again(tmp_path: Path) -> None:
    script = begin(tmp_path, evaluated(5))
    lease, _ = script.demand("s1", num_groups=2)
    script.advance(101.0)
    script.finish("s1", lease)
    assert lease.group not in {again.group for again in script.demand("s2")}


# -- the next start ---------------------------------------------------------------------------------------------------


def test_a_stop_during_the_first_evaluation_leaves_it_to_the_next_start(tmp_path: Path) -> None:
    settings = evaluated(5)
    script = begin(tmp_path, settings)
    script.coordinator.stop_after_step("asked to")
    (answer,) = script.ask(1)
    assert isinstance(answer, m.Ended)
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
    assert [(line["step"], line.get("loss")) for line in resumed.metrics()] == [(0, None), (1, 0.25)]
    assert scores(resumed) == {0: (0, 0.0), 1: (1, 0.5)}


def test_a_line_that_was_written_after_its_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    settings = evaluated(1)
    script = begin(tmp_path, settings)
    evaluate(script, 0, 0.0)
    take_step(script, 1)
    script.ledger.snapshot(tmp_path / "checkpoint")
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


# -- sets, answers, pinned --------------------------------------------------------------------------------------------


def test_other_sets_are_leased_at_their_temperature_and_have_figures_and_answers(tmp_path: Path) -> None:
    aime = HeldOutSet(prompts(2, "a"), 2, name="aime", temperature=0.5)
    script = Script(tmp_path, evaluated(5), num_prompts=80, num_held_out=3, more_sets=[aime])
    leases = [lease for lease in script.demand() if lease.kind == "eval"]
    temperatures = [lease.temperature for lease in leases]
    assert temperatures == [msgspec.UNSET, msgspec.UNSET, 0.5, 0.5]
    for lease in leases:
        for index in lease.sample_indices:
            script.deliver("s1", lease, index, reward=float(lease.temperature == 0.5), answer="x")
    (line,) = script.metrics()
    assert (line["eval_reward"], line["eval/aime/reward"], line["eval/aime/majority@2"]) == (0.0, 1.0, 1.0)
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
    assert (line["step"], line["eval_step"], line["eval_version_min"], line["eval_version_max"]) == (2, 2, 2, 2)
