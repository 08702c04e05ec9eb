"""Wasted tokens: what one lease made of one sample counts once, by the reason that says most, or not when trained."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from learner.audit.report import DeadLetter, Failure, Tokens, count_epochs, count_tokens, list_dead_letters
from learner.audit.run import AuditedRun
from learner.ledger.ledger import Ledger
from protocol.settings.settings import Settings
from tests.protocol.wire.examples import example_facts


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for position, group in enumerate(("trained", "given-up", "out")):
            ledger.lease(group, 0, f"uid-{group}", position, "s1", 2)
        ledger.add_trajectory(example_facts(group="trained", attempt=2))
        ledger.mark_trained(["trained"], 1, 4)
        yield ledger


@pytest.fixture
def run(ledger: Ledger, tmp_path: Path) -> Iterator[AuditedRun]:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        yield AuditedRun(tmp_path, Settings(), [], db, b"", [])


def wasted(ledger: Ledger, run: AuditedRun) -> list[Tokens]:
    ledger.commit()
    trained, *rest = count_tokens(run)
    assert trained == Tokens("trained", 1, 3)
    return rest


def test_tokens_of_another_lease_are_wasted(ledger: Ledger, run: AuditedRun) -> None:
    ledger.add_waste("trained", 1, 1, "duplicate", 5)
    ledger.add_waste("trained", 1, 3, "duplicate", 6)
    assert wasted(ledger, run) == [Tokens("duplicate", 2, 11)]


@pytest.mark.parametrize("reason", ["restart", "duplicate", "unknown"])
def test_tokens_are_not_wasted_when_they_were_sent_again_and_trained(
    ledger: Ledger, run: AuditedRun, reason: str
) -> None:
    ledger.add_waste("trained", 1, 2, reason, 3)
    assert wasted(ledger, run) == []


def test_tokens_count_once_by_the_reason_that_says_most(ledger: Ledger, run: AuditedRun) -> None:
    for reason in ("restart", "stale", "unknown", "unknown"):
        ledger.add_waste("out", 0, 1, reason, 7)
    assert wasted(ledger, run) == [Tokens("stale", 1, 7)]


def test_tokens_of_a_skipped_prompt_are_wasted_once(ledger: Ledger, run: AuditedRun) -> None:
    ledger.add_trajectory(example_facts(group="given-up", sample_index=0, attempt=1))
    ledger.add_trajectory(example_facts(group="given-up", sample_index=1, attempt=1))
    ledger.add_waste("given-up", 1, 1, "failed", 3)
    ledger.set_state(["given-up"], "skipped", reason="failed three times")
    assert wasted(ledger, run) == [Tokens("failed", 1, 3), Tokens("skipped", 1, 3)]


def test_dead_letters_have_their_failures_in_order(ledger: Ledger, run: AuditedRun) -> None:
    ledger.add_failure("given-up", 1, 1, "s1", "server", "s1 died")
    ledger.add_failure("given-up", 0, 2, "s2", "retriever", "timeout")
    ledger.add_failure("out", 0, 1, "s1", "server", "s1 died")
    ledger.set_state(["given-up"], "skipped", reason="failed")
    ledger.commit()
    failures = [Failure(1, 1, "s1", "server", "s1 died"), Failure(0, 2, "s2", "retriever", "timeout")]
    assert list_dead_letters(run) == [DeadLetter("uid-given-up", "given-up", "failed", None, 2, failures)]


def test_filtered_prompts_are_not_dead_letters_and_their_tokens_count_once(ledger: Ledger, run: AuditedRun) -> None:
    for index in (0, 1):
        ledger.add_trajectory(example_facts(group="out", sample_index=index))
        ledger.add_waste("out", index, example_facts().attempt, "filtered", 3)
    ledger.set_state(["out"], "skipped", reason="filtered: mean reward 1.0 is not above 0.0 and below 1.0")
    assert wasted(ledger, run) == [Tokens("filtered", 2, 6)]
    assert list_dead_letters(run) == []
    (epoch,) = count_epochs(run)
    assert (epoch.trained, epoch.filtered, epoch.skipped, epoch.under_way) == (1, 1, 0, {"leased": 1})
