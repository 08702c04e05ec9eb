"""Easy and hard prompts are drawn less often, by what the ledger says of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from learner.coordinator.groups.curriculum import Curriculum
from learner.coordinator.groups.prompt_source import PromptSource
from learner.data.prompts import Prompt
from learner.disk.run_folder import LEFT_OUT
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings

PROMPTS = [Prompt(f"p{i}", f"question {i}", "", {}) for i in range(4)]
REWARDS = {"p0": [1.0, 1.0], "p1": [0.0, 0.0], "p2": [1.0, 0.0], "p3": [0.0, 1.0]}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        yield ledger


def settings(max_steps: int = 100, **curriculum: Any) -> Settings:
    return Settings.model_validate(
        {
            "run": {"max_steps": max_steps},
            "rollout": {"group_size": 2},
            "learner": {"groups_per_step": 1},
            "data": {"train": "rows.jsonl", "curriculum": curriculum},
        }
    )


def train(ledger: Ledger, source: PromptSource, number: int, rewards: dict[str, list[float]] = REWARDS) -> list[str]:
    """Take groups and note them as trained with their prompts' rewards; returns their names."""
    names = []
    for _ in range(number):
        group = source.take()
        assert group is not None
        ledger.lease(group.name, group.epoch, group.prompt.uid, group.position, "s1", 1)
        for index, reward in enumerate(rewards[group.prompt.uid]):
            ledger._db.execute(
                "INSERT INTO trajectories VALUES (?, ?, 1, 1, 'train', 0, 's1', ?, ?, 9, 9, 1, 'stop', 0, 0, 1, 0, 0, "
                "0, 0, NULL)",
                (group.name, index, reward, json.dumps({"em": reward})),
            )
        ledger.set_state([group.name], "trained", step=1)
        names.append(group.name)
    return names


def drawing(settings: Settings, ledger: Ledger, prompts: Sequence[Prompt] = PROMPTS) -> tuple[PromptSource, Curriculum]:
    """Return a source that a curriculum decides for."""
    source, curriculum = PromptSource(prompts, settings, ledger, 0), Curriculum(settings, ledger)
    source.reason_to_leave_out = curriculum.reason_to_leave_out
    return source, curriculum


def left_out(ledger: Ledger) -> dict[str, str]:
    return dict(ledger._db.execute("SELECT \"group\", reason FROM prompts WHERE state = 'skipped'"))


def test_every_prompt_is_drawn_in_every_epoch_without_a_curriculum(ledger: Ledger) -> None:
    assert len({*train(ledger, PromptSource(PROMPTS, settings(), ledger, 0), 16)}) == 16
    assert left_out(ledger) == {}


def test_score_that_was_given_is_what_makes_a_prompt_easy(ledger: Ledger) -> None:
    source, _ = drawing(settings(easy=1.0, every=3), ledger)
    first = train(ledger, source, 1, {uid: [-1.0, 0.5] for uid in REWARDS})[0]
    ledger._db.execute("UPDATE trajectories SET reward_score = 1.0")
    train(ledger, source, 3, {uid: [0.0, 0.0] for uid in REWARDS})
    train(ledger, source, 3)
    assert list(left_out(ledger)) == [first.replace("e0", "e1")]


def test_easy_and_hard_prompts_are_drawn_again_after_some_epochs(ledger: Ledger) -> None:
    source, curriculum = drawing(settings(easy=1.0, hard=0.0, every=3), ledger)
    taken = train(ledger, source, 4 + 2 + 2 + 4)
    assert sorted(taken) == sorted(
        [f"e{epoch}-{uid}" for epoch in (0, 3) for uid in REWARDS]
        + [f"e{e}-{uid}" for e in (1, 2) for uid in ("p2", "p3")]
    )
    assert sorted(left_out(ledger)) == ["e1-p0", "e1-p1", "e2-p0", "e2-p1"]
    assert left_out(ledger)["e2-p0"] == f"{LEFT_OUT}mean reward 1.0 in epoch 0 is at least 1.0, drawn every 3 epochs"
    assert left_out(ledger)["e1-p1"] == f"{LEFT_OUT}mean reward 0.0 in epoch 0 is at most 0.0, drawn every 3 epochs"
    assert curriculum.take_counts() == {"data/curriculum_easy": 2, "data/curriculum_hard": 2}
    assert curriculum.take_counts() == {"data/curriculum_easy": 0, "data/curriculum_hard": 0}


def test_prompt_that_has_become_harder_is_drawn_each_epoch_again(ledger: Ledger) -> None:
    source, _ = drawing(settings(easy=1.0, every=2), ledger)
    train(ledger, source, 4)
    train(ledger, source, 3)  # epoch 1, without p0
    taken = train(ledger, source, 8, REWARDS | {"p0": [0.0, 1.0]})
    assert {"e2-p0", "e3-p0"} <= {*taken}


def test_curriculum_goes_on_where_it_was_after_a_restart(ledger: Ledger) -> None:
    given = settings(easy=1.0, hard=0.0, every=3)
    train(ledger, drawing(given, ledger)[0], 5)
    resumed = train(ledger, drawing(given, ledger)[0], 3)
    assert all(name.endswith(("p2", "p3")) for name in resumed)


def test_set_of_easy_prompts_alone_is_trained_still(ledger: Ledger) -> None:
    source, _ = drawing(settings(easy=0.0, every=1000), ledger)
    taken = train(ledger, source, 20)
    positions = ledger._db.execute("SELECT position FROM prompts ORDER BY position").fetchall()
    assert len({*taken}) == 20
    assert [position for (position,) in positions] == list(range(len(positions)))


def test_prompt_that_many_epochs_left_out_takes_as_few_queries_as_one_of_the_last_epoch(ledger: Ledger) -> None:
    source, curriculum = drawing(settings(easy=1.0, every=1000), ledger)
    train(ledger, source, 4 + 3 * 20)
    queries: list[str] = []
    ledger._db.set_trace_callback(queries.append)
    assert curriculum.reason_to_leave_out("p0", 20) is not None
    assert len(queries) <= 6


def test_source_passes_a_thousand_prompts_at_once(ledger: Ledger) -> None:
    prompts = [Prompt(f"p{i}", "?", "", {}) for i in range(1100)]
    source, _ = drawing(settings(max_steps=10_000, easy=0.0, every=9), ledger, prompts)
    train(ledger, source, 1100, {prompt.uid: [1.0, 1.0] for prompt in prompts})
    assert source.take() is not None  # drawn after a thousand
    assert source.take() is None
    assert source.take() is not None


def test_samples_without_the_score_say_nothing_about_their_prompt(ledger: Ledger) -> None:
    given = settings(hard=0.0, every=3)
    other = given.model_copy(update={"filter": given.filter.model_copy(update={"score": "style"})})
    source, _ = drawing(other, ledger)
    assert len({*train(ledger, source, 8)}) == 8  # two epochs, each with all four prompts
    assert left_out(ledger) == {}
