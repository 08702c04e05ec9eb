"""Failures counted by name: the first is logged at once, further ones once a minute."""

import logging

import pytest

from rollout.session.outbox import FailureCounts


def test_failures_of_a_name_are_logged_at_once_and_then_each_minute_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = FailureCounts(logging.getLogger("failures"), "s0")
    for now in (100.0, 130.0, 159.9, 160.0, 161.0):
        counts.add("reward:em", "503", "it is made again", now)
    counts.add("retriever", "down", "it is made again", 162.0)
    lines = [f'reward:em failed  count={number} last="503"' for number in (1, 3)]
    lines.append('retriever failed  count=1 last="down"')
    assert [record.getMessage() for record in caplog.records] == [
        f's0  {line} consequence="it is made again"' for line in lines
    ]
    assert counts.totals == {"reward:em": 5, "retriever": 1}
