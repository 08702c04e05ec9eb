"""The indexes of all nodes are compared by their content hashes when servers are attached."""

import pytest

from learner.run.same_index import SameIndex, compare_indexes
from protocol.errors import OperatorError


@pytest.mark.parametrize("hashes", [{}, {"s0": "a1", "s1": "a1"}, {"s0": "", "s1": ""}, {"s0": "a1", "s1": ""}])
def test_servers_that_search_one_index_or_tell_none_are_fine(hashes: dict[str, str]) -> None:
    assert compare_indexes(hashes, "refuse") is None


def test_servers_of_different_indexes_are_named() -> None:
    text = compare_indexes({"s0": "a1", "s1": "b2", "s2": "a1"}, "warn")
    assert text is not None
    assert "s0 searches a1, s1 searches b2, s2 searches a1" in text


def test_servers_of_different_indexes_end_the_start_when_asked_for() -> None:
    with pytest.raises(OperatorError, match=r"With retriever\.other_index = warn the run goes on in spite of this\."):
        compare_indexes({"s0": "a1", "s1": "b2"}, "refuse")


def test_server_that_is_attached_later_is_compared_with_those_before() -> None:
    indexes = SameIndex("warn")
    assert indexes.take({"s0": "a1", "s1": "a1"}) is None
    text = indexes.take({"s2": "b2"})
    assert text is not None
    assert "s0 searches a1, s1 searches a1, s2 searches b2" in text
    assert indexes.take({"s2": "b2"}) is None  # it was told
    assert indexes.take({"s2": "a1"}) is None  # it is put right
    assert indexes.take({"s2": "b2"}) == text


def test_server_that_is_refused_is_compared_with_no_other() -> None:
    indexes = SameIndex("refuse")
    indexes.take({"s0": "a1"})
    with pytest.raises(OperatorError, match="s1 searches b2"):
        indexes.take({"s1": "b2"})
    assert indexes.take({"s2": "a1"}) is None
