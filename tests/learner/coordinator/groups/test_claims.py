"""A run goes on with the prompts, the seed and the weights that it began with, or says what differs."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from learner.coordinator.groups.prompt_source import claim_prompts
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

PROMPTS = [Prompt(f"{i:020x}", f"question {i}", "", {}) for i in range(4)]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        yield ledger


def claim(ledger: Ledger, prompts: list[Prompt], **data: Any) -> str:
    """Return why a start is refused; empty when it is not."""
    try:
        claim_prompts(ledger, Settings.model_validate({"data": {"train": "rows.jsonl"} | data}), prompts)
    except SettingsError as error:
        return str(error)
    return ""


def test_the_same_prompts_in_the_same_order_go_on(ledger: Ledger) -> None:
    assert claim(ledger, PROMPTS) == claim(ledger, PROMPTS) == ""


def test_other_prompts_are_refused(ledger: Ledger) -> None:
    claim(ledger, PROMPTS)
    assert claim(ledger, PROMPTS[:3]).startswith("settings: data.train = rows.jsonl holds other prompts than this run")


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("data", [{"shuffle": False}, {"train": [{"path": "rows.jsonl", "weight": 1}]}])
def test_another_order_of_the_same_prompts_is_refused(ledger: Ledger, data: dict[str, Any], is_old: bool) -> None:
    claim(ledger, PROMPTS)
    if is_old:  # a ledger that was begun when there was no other order
        ledger._db.execute("DELETE FROM meta WHERE key = 'claim:order'")
    assert "and this run began with 'shuffled'. Put them back" in claim(ledger, PROMPTS, **data)
    assert claim(ledger, PROMPTS) == ""
