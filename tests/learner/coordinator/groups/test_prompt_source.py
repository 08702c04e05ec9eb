"""Where training groups come from: how many, in which order, and after a resume."""

from contextlib import closing
from pathlib import Path
from typing import Any

from learner.coordinator.groups.prompt_source import PromptSource
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
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
