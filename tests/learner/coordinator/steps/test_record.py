"""metrics.jsonl and samples.jsonl: whole lines, and no value that was not measured."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from learner.coordinator.groups.group import Group
from learner.coordinator.steps.record import RunRecord
from learner.coordinator.steps.step_batch import StepBatch, build_step
from learner.data.prompts import Prompt
from protocol.errors import OperatorError
from protocol.settings.learner import LearnerSettings
from tests.protocol.wire.examples import make_trajectory


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def four_trajectories() -> StepBatch:
    group = Group("a", Prompt("a", "?", "A", {}), "train", 0, 0, 4)
    for index in range(4):
        group.receive(make_trajectory("a", index, "s1", 3, index / 4))
    return build_step(2, 5, [group], LearnerSettings(groups_per_step=1))


def test_a_steps_line_appends_one_line_with_its_times(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, samples_per_step=1)
    record.write_line(record.stamp(1, 1, {"policy/loss": -0.5}))
    record.write_line(record.stamp(2, 2, {"policy/loss": -0.123456789}))
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["step"], first["policy_version"], first["policy/loss"]) == (1, 1, -0.5)
    assert (second["step"], second["policy/loss"]) == (2, -0.1234568)
    assert second["at_s"] == round(second["at_s"], 3) == pytest.approx(time.time(), abs=60)
    assert 0 <= first["time_s"] <= second["time_s"] < 60
    assert set(first) == {"step", "policy_version", "time_s", "at_s", "policy/loss"}


def test_a_steps_line_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, 1)
    record.write_line(record.stamp(1, 1, {"policy/loss": math.nan, "policy/kl_sampler": math.inf, "policy/entropy": 0}))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert "policy/loss" not in line
    assert "policy/kl_sampler" not in line
    assert line["policy/entropy"] == 0


def test_a_steps_line_adds_speeds_when_samples_were_counted(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, 1)
    record.write_line(record.stamp(1, 1, {"data/num_samples": 8, "data/num_model_tokens": 80}))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line["perf/tokens_per_s"] == pytest.approx(10 * line["perf/samples_per_s"], rel=1e-5)


def test_write_samples_keeps_as_many_as_asked_for_spread_over_the_step(tmp_path: Path) -> None:
    RunRecord(tmp_path, samples_per_step=2).write_samples(four_trajectories())
    samples = lines(tmp_path / "samples.jsonl")
    assert [sample["reward"] for sample in samples] == [0.0, 0.5]
    assert samples[0].pop("start") == samples[1]["start"] == pytest.approx(time.time(), abs=60)
    assert samples[0] == {
        "step": 2,
        "group": "a",
        "sample_index": 0,
        "reward": 0.0,
        "reward_parts": {"exact_match": 0.0},
        "staleness": 2,
        "finish": "answer",
        "num_prompt_tokens": 2,
        "prompt": "1 2 ",
        "response": "3 4 ",
        "label": "A",
        "tokens": [1, 2, 3, 4],
        "loss_mask": [0, 0, 1, 1],
        "version_spans": [[2, 4, 3]],
        "calls": [],
        "logprobs": [0.0, 0.0, -0.5, -0.5],
    }


def test_write_samples_writes_nothing_when_none_are_asked_for(tmp_path: Path) -> None:
    RunRecord(tmp_path, samples_per_step=0).write_samples(four_trajectories())
    assert list(tmp_path.iterdir()) == []


def test_a_steps_line_says_when_the_folder_is_gone(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "gone", 1)
    with pytest.raises(OperatorError) as caught:
        record.write_line(record.stamp(1, 1, {}))
    assert str(caught.value) == (
        f"{tmp_path / 'gone' / 'metrics.jsonl'} cannot be written: No such file or directory. "
        "Free the disk, then run again."
    )


@pytest.mark.parametrize("earlier", ["", '{"step": 1}\n'])
def test_line_that_a_full_disk_cut_off_does_not_take_the_next_one_with_it(tmp_path: Path, earlier: str) -> None:
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_text(f'{earlier}{{"step": 2, "policy_ver')
    record = RunRecord(tmp_path, samples_per_step=1)
    assert record.newest_step() == (1 if earlier else None)
    record.write_line(record.stamp(2, 2, {}))
    record.write_samples(four_trajectories())
    record.write_answers([{"step": 2}])
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        assert [line["step"] for line in lines(tmp_path / name)] == ([1, 2] if earlier else [2])


def test_speeds_count_from_the_line_before_though_it_was_held_back(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, 1)
    held = record.stamp(1, 1, {})
    time.sleep(0.2)
    record.write_line(held)
    line = record.stamp(2, 2, {"data/num_samples": 1, "data/num_model_tokens": 1})
    assert line.values["time_s"] - held.values["time_s"] >= 0.19
    assert 1 / line.values["perf/samples_per_s"] <= line.values["time_s"] - held.values["time_s"] - 0.19
