"""The servers of a running attempt: late ones, and the comparison of their indexes."""

from pathlib import Path

import pytest

from learner.run.servers import compare_indexes
from protocol.errors import NeighbourError, OperatorError
from tests.learner.run.played_servers import PlayedRun


def test_late_server_gets_pushes_once_it_serves() -> None:
    run = PlayedRun(2, late=["s0"])
    assert (run.servers.ready_names, run.servers.late_names) == (("s1",), ["s0"])
    assert run.poll() == run.calls.pushed_to == []
    run.calls.silent = set()
    assert "s0 serves, from the next push on" in run.poll()
    assert run.calls.pushed_to == [("s0", "s1")]


@pytest.mark.parametrize("digests", [{}, {"s0": "a1", "s1": "a1"}, {"s0": "", "s1": ""}, {"s0": "a1", "s1": ""}])
def test_servers_that_search_one_index_or_none_are_accepted(digests: dict[str, str]) -> None:
    assert compare_indexes(digests, "refuse") is None


def test_servers_with_other_indexes_are_named_or_refused() -> None:
    digests = {"s0": "a1", "s1": "a1", "s2": "b2"}
    assert "s0 searches a1, s1 searches a1, s2 searches b2" in str(compare_indexes(digests, "warn"))
    with pytest.raises(OperatorError, match=r"s2 searches b2.* With retriever\.other_index = warn the run continues\."):
        compare_indexes(digests, "refuse")


def test_refused_server_is_compared_with_no_other() -> None:
    run = PlayedRun(3, other_index="refuse")
    run.servers.note_attached({"s0": {"content_hash": "a1"}})
    with pytest.raises(OperatorError, match="s1 searches b2"):
        run.servers.note_attached({"s1": {"content_hash": "b2"}})
    assert run.servers.note_attached({"s2": {"content_hash": "a1"}}) == []


def test_index_that_a_resume_changed_is_named_once(tmp_path: Path) -> None:
    record = tmp_path / "index"
    assert PlayedRun(1, record=record).servers.note_attached({"s0": {"content_hash": "a1"}}) == []
    now = PlayedRun(2, record=record).servers
    (warning,) = now.note_attached({"s0": {"content_hash": "b2"}})
    assert "s0 searches b2, the last start of this run searches a1" in warning
    assert now.note_attached({"s1": {"content_hash": "b2"}}) == []
    assert PlayedRun(1, record=record).servers.note_attached({"s0": {"content_hash": "b2"}}) == []


def test_tools_that_an_mcp_server_lists_otherwise_later_are_said_once_or_refused() -> None:
    now = PlayedRun(2, tools="a1").servers
    assert now.note_attached({"s0": {"tools_digest": "a1"}}) == []
    (message,) = now.note_attached({"s0": {"tools_digest": "b2"}, "s1": {"tools_digest": "b2"}})
    assert message.startswith("s0: the tools of tools.mcp have other names, descriptions or parameters than")
    with pytest.raises(OperatorError, match=r"s0: the tools of tools\.mcp have other .* when all nodes have the same"):
        PlayedRun(1, tools="a1", refuse_other_tools=True).servers.note_attached({"s0": {"tools_digest": "b2"}})


def test_a_server_that_ray_restarts_on_another_gpu_than_its_ranks_ends_the_attempt() -> None:
    apart, shared = PlayedRun(1), PlayedRun(1, share_devices=True)
    assert shared.poll() == []
    for run in (apart, shared):
        run.calls.cards = ["5"]
    assert apart.poll() == []
    with pytest.raises(NeighbourError, match="s0: was restarted on GPU 5, and its ranks share GPU 3"):
        shared.poll()
