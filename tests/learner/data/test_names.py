"""A group's name, written and read."""

import pytest

from learner.data.names import GroupName


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (GroupName("train", 0, "aa"), "e0-aa"),
        (GroupName("train", 12, "file-7"), "e12-file-7"),
        (GroupName("eval", 50, "aa"), "eval-50-aa"),
        (GroupName("eval", 0, "e1-aa"), "eval-0-e1-aa"),
    ],
)
def test_a_group_name_is_read_as_it_was_written(name: GroupName, text: str) -> None:
    assert str(name) == text
    assert GroupName.parse(text) == name


@pytest.mark.parametrize("text", ["", "aa", "e-aa", "e1", "e1-", "eval-aa", "xe1-aa", "eval-1-"])
def test_what_is_no_group_name_is_not_read(text: str) -> None:
    assert GroupName.parse(text) is None
