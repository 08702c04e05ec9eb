"""The learner's values of recorded samples: those before the first update, of the chosen samples alone."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from learner.data.recorded import group_every, recorded_indices
from learner.rank.learner_values import RecordedValues
from protocol.settings.settings import Settings
from tests.learner.objectives.slow_policy_gradient import batch_of, table, trajectories
from tests.learner.objectives.table_model import TableModel, logprobs_of
from tests.learner.objectives.test_policy_gradient import objective_of

PLAN = [[8, 0, 3], [1, 2], [4, 5, 6, 7]]


def settings_of(samples: int) -> Settings:
    return Settings.model_validate(
        {"learner": {"num_epochs": 2}, "report": {"samples_per_step": samples}, "run": {"max_steps": 1000}}
    )


def read(folder: Path) -> list[dict[str, Any]]:
    (path,) = (folder / "learner_values").iterdir()
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def test_values_are_those_before_the_first_update_of_the_recorded_samples(tmp_path: Path) -> None:
    made, settings, first = trajectories(), settings_of(2), table().detach()
    batch = batch_of(made, PLAN, list(range(9)))
    _, prepared = objective_of(settings).prepare(batch, dict(enumerate(made)), 4)
    model = TableModel(table())
    recorded = RecordedValues(objective_of(settings, model), settings, tmp_path, 3)
    assert recorded.take_step(batch, dict(enumerate(made)), 4).applied
    assert not torch.equal(model.logits, first)

    assert [path.name for path in (tmp_path / "learner_values").iterdir()] == [f"step_{batch.step}.rank_3.json"]
    rows = {(row["group"], row["sample_index"]): row for row in read(tmp_path)}
    wanted = recorded_indices(batch.facts, batch.step, 2, group_every(settings))
    assert list(rows) == [(made[i].facts.group, made[i].facts.sample_index) for i in wanted]
    for part in prepared:
        logprobs = torch.split(logprobs_of(first, part), list(part.counts))
        advantages = torch.split(part.advantages, list(part.counts))
        for number, own, advantage in zip(part.numbers, logprobs, advantages, strict=True):
            if number in wanted:
                facts = made[number].facts
                row = rows[facts.group, facts.sample_index]
                assert row["logprobs"] == pytest.approx(own.tolist(), abs=5.1e-5)
                assert row["advantages"] == pytest.approx(advantage.tolist(), abs=5.1e-5)
                assert len(row["entropies"]) == facts.num_model_tokens


def test_values_of_a_step_in_parts_are_those_of_the_whole_step(tmp_path: Path) -> None:
    made = trajectories()
    given = {"learner": {"groups_per_step": 3}, "rollout": {"group_size": 3}, "report": {"samples_per_step": 4}}
    settings = Settings.model_validate(given | {"run": {"max_steps": 1000}})
    whole = RecordedValues(objective_of(settings), settings, tmp_path / "whole", 0)
    in_parts = RecordedValues(objective_of(settings), settings, tmp_path / "parts", 0)
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole.take_step(batch_of(made, [list(range(9))]), dict(enumerate(made)), 4)
    for part, groups in enumerate((made[:3], made[3:])):
        indices = list(range(len(groups)))
        batch = msgspec.structs.replace(batch_of(groups, [indices]), part=part, is_last=part == 1)
        (in_parts.take_step if part else in_parts.take_part)(batch, dict(enumerate(groups)), 4)
    names = [(row["group"], row["sample_index"]) for row in read(tmp_path / "whole")]
    assert len(names) >= 4
    by_name = {(row["group"], row["sample_index"]): row for row in read(tmp_path / "parts")}
    assert list(by_name) == names
    assert [by_name[name] for name in names] == read(tmp_path / "whole")


def test_a_rank_that_trains_no_recorded_sample_writes_nothing(tmp_path: Path) -> None:
    made, settings = trajectories(), settings_of(1)
    recorded = RecordedValues(objective_of(settings), settings, tmp_path, 0)
    batch = msgspec.structs.replace(batch_of(made, [[8, 7]], list(range(9))), step=7)
    assert recorded_indices(batch.facts, 7, 1, group_every(settings)) == [0]
    recorded.take_step(batch, {8: made[8], 7: made[7]}, 4)
    assert list(tmp_path.iterdir()) == []


def test_recorded_samples_are_spread_and_a_whole_group_comes_with_the_first_step() -> None:
    facts = [each.facts for each in trajectories()]
    assert recorded_indices(facts, 1, 2, 50) == [0, 1, 2, 4]
    assert recorded_indices(facts, 2, 2, 50) == [0, 4]
    assert recorded_indices(facts, 50, 1, 50) == [0, 1, 2]
    assert recorded_indices(facts, 50, 0, 50) == []
