"""The reward sets of a run folder: which is in force at a start, and what is no list of them."""

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import OperatorError
from protocol.settings.reward_sets import (
    REWARD_SETS,
    changing_sets,
    first_set,
    new_set,
    read_sets,
    with_start,
    write_sets,
)
from protocol.settings.rewards import RewardsSettings


def rewards(*names: str, **more: Any) -> RewardsSettings:
    endpoints = [{"name": name, "url": f"http://127.0.0.1:1/{name}"} for name in names]
    return RewardsSettings.model_validate({"endpoints": endpoints, **more})


def test_first_start_begins_with_the_settings_own_set() -> None:
    (only,) = with_start([], rewards("math"))
    assert (only.number, only.source, [one.name for one in only.endpoints]) == (1, "settings", ["math"])


def test_start_with_the_same_settings_goes_on_with_what_the_command_gave() -> None:
    sets = [first_set(rewards("math")), new_set(rewards("new"), 2, "command")]
    assert with_start(sets, rewards("math", clip=3.0)) == sets


def test_start_with_other_settings_is_a_set_of_its_own_after_the_commands() -> None:
    sets = [first_set(rewards("math")), new_set(rewards("new"), 2, "command")]
    newest = with_start(sets, rewards("other"))[-1]
    assert (newest.number, newest.source, newest.endpoints[0].name) == (3, "settings", "other")


def test_set_of_a_start_has_a_number_that_the_accounts_do_not_know() -> None:
    assert with_start([], rewards("math"), known=4)[0].number == 5


def test_sets_are_read_as_they_were_written(tmp_path: Path) -> None:
    sets = [first_set(rewards("math", combine="mean")), new_set(rewards("new", "b"), 2, "command")]
    with changing_sets(tmp_path):
        write_sets(tmp_path, sets)
    assert read_sets(tmp_path) == sets
    assert read_sets(tmp_path)[1].over(rewards("math", clip=2.0)) == rewards("new", "b", clip=2.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", r"rewards\.json is no list of reward sets \(: Invalid JSON.* without the file, the next start goes by"),
        ('{"sets": []}', r"rewards\.json is no list of reward sets \(sets: List should have at least 1 item"),
        ('{"sets": [SET, SET]}', r"rewards\.json holds the sets \[1, 1\]; expected rising numbers"),
    ],
)
def test_file_that_is_no_list_of_sets_is_refused_in_words(tmp_path: Path, text: str, problem: str) -> None:
    one = first_set(rewards("math")).model_dump_json()
    (tmp_path / REWARD_SETS).write_text(text.replace("SET", one))
    with pytest.raises(OperatorError, match=problem):
        read_sets(tmp_path)
