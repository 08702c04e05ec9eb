"""The audit's rule on filtered groups, each way that a ledger may break it."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit.counts import Tokens, count_epochs, count_tokens, list_dead_letters
from learner.audit.filters import check_filters
from learner.audit.run import AuditedRun
from learner.audit.steps import Terms
from learner.data.filtered import OutsideBounds, mean_score, parse_outside_bounds
from learner.ledger.ledger import Ledger
from learner.ledger.terms import terms_of
from protocol.settings.settings import Settings
from tests.protocol.wire.examples import example_facts

SETTINGS = Settings.model_validate({"filter": {"dynamic_sampling": True}})
REASON = "filtered: mean reward 1.0 is not above 0.0 and below 1.0"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """One group trained with the rewards 0 and 1, one filtered with 1 and 1, by the bounds 0 and 1."""
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.begin_terms(1, terms_of(SETTINGS))
        for position, (group, rewards) in enumerate({"useful": (0.0, 1.0), "easy": (1.0, 1.0)}.items()):
            ledger.lease(group, 0, f"uid-{group}", position, "s1", 1)
            for index, reward in enumerate(rewards):
                ledger.add_trajectory(example_facts(group=group, sample_index=index, reward=reward))
        ledger.mark_trained(["useful"], 1, 4)
        ledger.set_state(["easy"], "skipped", reason=REASON)
        yield ledger


def breaches(ledger: Ledger, folder: Path) -> list[str]:
    ledger.commit()
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        run = AuditedRun(folder, SETTINGS, [], db, b"", [])
        return [breach.problem for breach in check_filters(run, Terms(run))]


def test_a_filter_that_did_what_its_settings_say_breaks_nothing(ledger: Ledger, tmp_path: Path) -> None:
    assert breaches(ledger, tmp_path) == []


def test_mean_is_that_of_the_scores_where_samples_were_given_some(ledger: Ledger, tmp_path: Path) -> None:
    for group, rewards, scores in (("useful", (-1.0, -1.0), (0.0, 1.0)), ("easy", (0.25, 0.75), (1.0, 1.0))):
        for index in (0, 1):
            scored = {"reward": rewards[index], "reward_score": scores[index]}
            ledger.add_trajectory(example_facts(group=group, sample_index=index, **scored))
    ledger.mark_trained(["useful"], 1, 4)
    assert breaches(ledger, tmp_path) == []


def test_ledger_that_knows_no_scores_is_judged_by_its_rewards(ledger: Ledger, tmp_path: Path) -> None:
    ledger._db.execute("COMMIT")
    ledger._db.execute("ALTER TABLE trajectories DROP COLUMN reward_score")
    assert breaches(ledger, tmp_path) == []


def test_filtered_prompts_are_no_dead_letters_and_have_their_own_column(ledger: Ledger, tmp_path: Path) -> None:
    ledger.commit()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        run = AuditedRun(tmp_path, SETTINGS, ["uid-useful", "uid-easy", "uid-later"], db, b"", [])
        (epoch,) = count_epochs(run)
        assert list_dead_letters(run) == []
    assert (epoch.trained, epoch.filtered, epoch.skipped, epoch.to_come) == (1, 1, 0, 1)


def test_tokens_of_a_filtered_group_count_once_as_filtered(ledger: Ledger, tmp_path: Path) -> None:
    for index in (0, 1):
        ledger.add_waste("easy", index, example_facts().attempt, "filtered", 3)
    ledger.commit()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        tokens = count_tokens(AuditedRun(tmp_path, SETTINGS, [], db, b"", []))
    assert tokens[1:] == [Tokens("filtered", 2, 6)]


@pytest.mark.parametrize(
    ("group", "rewards", "state", "reason", "problem"),
    [
        (
            "useful",
            (1.0, 1.0),
            "trained",
            None,
            "was trained, though its mean reward 1.0 is not above 0.0 and below 1.0",
        ),
        ("easy", (0.0, 1.0), "skipped", REASON, "was filtered for a mean reward of 1.0, by the ledger it is 0.5"),
        (
            "easy",
            (0.0, 1.0),
            "skipped",
            REASON.replace("1.0 is", "0.5 is"),
            "was filtered, though its mean reward 0.5 is above 0.0 and below 1.0",
        ),
        (
            "easy",
            (1.0, 1.0),
            "skipped",
            REASON.replace("above 0.0", "above 0.25"),
            "was filtered by reward between 0.25 and 1.0, which no start of the run had",
        ),
        (
            "easy",
            (1.0, 1.0),
            "skipped",
            "filtered: no",
            "is filtered for a reason that names no bounds: 'filtered: no'",
        ),
    ],
)
def test_a_filter_that_did_something_else_is_named(
    ledger: Ledger, tmp_path: Path, group: str, rewards: tuple[float, ...], state: str, reason: str | None, problem: str
) -> None:
    for index, reward in enumerate(rewards):
        ledger.add_trajectory(example_facts(group=group, sample_index=index, reward=reward))
    ledger.set_state([group], state, 1 if state == "trained" else None, reason)
    assert breaches(ledger, tmp_path) == [problem]


def test_a_group_kept_with_its_reason_breaks_nothing(ledger: Ledger, tmp_path: Path) -> None:
    ledger.add_trajectory(example_facts(group="useful", sample_index=0, reward=1.0))
    ledger.set_state(
        ["useful"], "trained", 1, f"kept: {parse_outside_bounds(REASON)}; 40 groups were filtered before it"
    )
    assert breaches(ledger, tmp_path) == []


def test_a_filtered_group_without_samples_is_named(ledger: Ledger, tmp_path: Path) -> None:
    ledger.delete_trajectories("easy")
    assert breaches(ledger, tmp_path) == ["is filtered, but the ledger has no sample of it"]


def test_reasons_are_read_back_as_they_were_written() -> None:
    why = OutsideBounds("reward", 1 / 3, 0.4, 1e-7)
    assert (
        parse_outside_bounds(f"filtered: {why}")
        == parse_outside_bounds(f"kept: {why}; 3 groups were filtered before it")
        == why
    )
    assert parse_outside_bounds("step not applied: loss is nan") is None


def test_mean_of_equal_scores_is_the_score() -> None:
    assert all(mean_score([score] * 7) == score for score in (0.1, 0.3, 1.0, -2.7))
