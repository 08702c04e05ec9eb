"""Marks of drained nodes, asked of a real head by a run's command: also of one that stands still."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy.cluster.ray_processes import ray_processes
from deploy.node.home import Home
from learner.cluster.drain_marks import DrainMarks
from protocol.node.ray_nodes import DrainReport, drain, read_drain_report, undrain
from tests.deploy.running_cluster import RunningCluster
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.stack

_NODE = "d" * 56
_WORD = DrainReport(text="It is left.")


@contextmanager
def standing_still(cluster: RunningCluster) -> Iterator[None]:
    """Stop Ray's head within the block."""
    (head,) = [each for each in ray_processes(Home(cluster.home)) if "gcs_server" in each.name()]
    head.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        head.send_signal(signal.SIGCONT)


def test_nobody_waits_for_a_head_that_stands_still_and_what_it_was_told_comes_once_it_goes_on(
    cluster: RunningCluster,
) -> None:
    with cluster.connected():
        marks = DrainMarks()
        assert marks.exchange({}) == frozenset()
        drain(_NODE)
        assert marks.exchange({}) == {_NODE}
        with standing_still(cluster):
            begun = time.monotonic()
            for _ in range(4):
                assert marks.exchange({_NODE: _WORD}) == {_NODE}
            assert time.monotonic() - begun < 2.0
        wait_until(lambda: marks.exchange({_NODE: _WORD}) and read_drain_report(_NODE) == _WORD)
        undrain(_NODE)
        wait_until(lambda: marks.exchange({}) == frozenset())
