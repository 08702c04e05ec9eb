"""Polling with a deadline."""

import time

from protocol.waits import until


def test_condition_is_tested_once_without_a_wait() -> None:
    assert list(until(0.0)) == [0.0]


def test_condition_is_tested_at_once_after_each_pause_and_at_the_deadline() -> None:
    started = time.monotonic()
    left_s = list(until(0.25, poll_s=0.1))
    assert 0.25 <= time.monotonic() - started < 1.0
    assert left_s[0] == 0.25
    assert left_s[-1] == 0.0
    assert left_s == sorted(left_s, reverse=True)
    assert 3 <= len(left_s) <= 5


def test_pause_ends_at_the_deadline() -> None:
    started = time.monotonic()
    assert len(list(until(0.1, poll_s=60.0))) == 2
    assert time.monotonic() - started < 1.0
