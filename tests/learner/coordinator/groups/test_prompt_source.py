"""Where training groups come from: how many, in which order, and after a resume."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from learner.coordinator.groups.prompt_source import PromptSource, claim_prompts
from learner.data.prompt_set import load_prompts
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from protocol.errors import SettingsError
from protocol.settings.data import DataSettings
from protocol.settings.settings import Settings

SETTINGS = Settings.model_validate(
    {"run": {"max_steps": 3}, "rollout": {"group_size": 2}, "learner": {"groups_per_step": 2}}
)
PROMPTS = [Prompt(f"p{i}", f"question {i}", f"answer {i}", {}) for i in range(4)]


def names(source: PromptSource) -> list[str]:
    """Take everything a source gives."""
    taken: list[Any] = []
    while (group := source.take()) is not None:
        taken.append(group.name)
    return taken


def test_source_gives_the_groups_of_the_remaining_steps_and_then_none(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        taken = names(PromptSource(PROMPTS, SETTINGS, ledger, last_step=0))
    assert sorted(taken[:4]) == ["e0-p0", "e0-p1", "e0-p2", "e0-p3"]
    assert [name[:3] for name in taken[4:]] == ["e1-", "e1-"]


def test_source_gives_one_more_for_a_prompt_that_was_skipped(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        source = PromptSource(PROMPTS, SETTINGS, ledger, last_step=2)
        assert len(names(source)) == 2
        source.replace_skipped()
        assert len(names(source)) == 1


def test_another_row_is_the_one_before_in_the_order_and_never_the_same_row(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        source = PromptSource(PROMPTS, SETTINGS, ledger, last_step=0)
        order = [group.prompt.uid for _ in range(6) if (group := source.take()) is not None]
        others = [source.another(position).uid for position in range(6)]
        alone = PromptSource(PROMPTS[:2], SETTINGS, ledger, last_step=0)
        assert [source.another(0).uid, *others[1:4]] == [order[1], *order[:3]]
        assert all(alone.another(position) != PROMPTS[alone._order.at(position)[1]] for position in range(9))


def test_source_recalls_what_was_leased_and_then_goes_on_in_order(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        order = names(PromptSource(PROMPTS, SETTINGS, ledger, last_step=0))
    with closing(Ledger(tmp_path / "resumed.sqlite")) as ledger:
        first = PromptSource(PROMPTS, SETTINGS, ledger, last_step=0).take()
        assert first is not None
        ledger.lease(first.name, first.epoch, first.prompt.uid, first.position, "s1", attempt=2)
        resumed = PromptSource(PROMPTS, SETTINGS, ledger, last_step=0)
        recalled = resumed.take()
        assert recalled is not None
        assert (recalled.name, recalled.attempt) == (first.name, 2)
        assert names(resumed)[:3] == order[1:4]


CLAIMED = [Prompt(f"{i:020x}", f"question {i}", "", {}) for i in range(4)]


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
    assert claim(ledger, CLAIMED) == claim(ledger, CLAIMED) == ""


def test_other_prompts_are_refused(ledger: Ledger) -> None:
    claim(ledger, CLAIMED)
    assert claim(ledger, CLAIMED[:3]).startswith("settings: data.train = rows.jsonl holds other prompts than this run")


@pytest.mark.parametrize("is_old", [False, True])
def test_other_values_in_other_columns_are_refused(ledger: Ledger, tmp_path: Path, is_old: bool) -> None:
    def row(**columns: object) -> list[Prompt]:
        (tmp_path / "rows.jsonl").write_text(json.dumps(columns | {"prompt": "1 + 1", "label": "2"}))
        return list(load_prompts(str(tmp_path / "rows.jsonl"), DataSettings()))

    claim(ledger, row(data_source="gsm8k", extra_info={"a": 1, "b": 2}))
    assert claim(ledger, row(extra_info={"b": 2, "a": 1}, data_source="gsm8k")) == ""
    other = row(data_source="gsm8k", extra_info={"a": 1, "b": 3})
    if is_old:  # a ledger of version 0.1.0, which did not record them
        ledger._db.execute("DELETE FROM meta WHERE key = 'claim:rows'")
        assert claim(ledger, other) == ""
    else:
        assert "holds this run's prompts and labels, and other values in other columns" in claim(ledger, other)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("data", [{"shuffle": False}, {"train": [{"path": "rows.jsonl", "weight": 1}]}])
def test_another_order_of_the_same_prompts_is_refused(ledger: Ledger, data: dict[str, Any], is_old: bool) -> None:
    claim(ledger, CLAIMED)
    if is_old:  # a ledger that was begun when there was no other order
        ledger._db.execute("DELETE FROM meta WHERE key = 'claim:order'")
    assert "and this run began with 'shuffled'. Put them back" in claim(ledger, CLAIMED, **data)
    assert claim(ledger, CLAIMED) == ""
