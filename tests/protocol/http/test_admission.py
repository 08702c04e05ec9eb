"""How many requests a service takes on, by their number and by how fast the last ones were answered."""

from contextlib import ExitStack

import pytest

from protocol.http.admission import Admission
from tests.fakes.clock import Clock


def _answer_together(admission: Admission, clock: Clock, number: int, seconds: float) -> None:
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(admission.under_way())
        clock.now += seconds


def test_a_service_is_full_when_as_many_are_under_way_as_it_takes() -> None:
    admission = Admission(max_requests=3, max_wait_s=1.0)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(admission.under_way())
        assert not admission.is_full()
        assert admission.is_full(num_arriving=1)
        stack.enter_context(admission.under_way())
        assert admission.is_full()
    assert not admission.is_full()


def test_requests_that_are_answered_together_share_their_time() -> None:
    clock = Clock()
    admission = Admission(max_requests=1000, max_wait_s=1.0, clock=clock)
    assert admission.answer_s == 0.0
    for _ in range(20):
        _answer_together(admission, clock, 50, 0.5)
        clock.now += 60.0  # nothing is asked meanwhile
    assert admission.answer_s == pytest.approx(0.01, rel=0.3)


def test_a_service_is_full_when_a_newcomer_would_wait_for_too_long() -> None:
    clock = Clock()
    admission = Admission(max_requests=1000, max_wait_s=1.0, clock=clock)
    for _ in range(1000):
        _answer_together(admission, clock, 1, 0.02)
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(admission.under_way())
        assert not admission.is_full()
        stack.enter_context(admission.under_way())
        assert admission.is_full()


def test_a_few_are_always_taken_on_and_show_that_a_slow_service_is_quick_again() -> None:
    clock = Clock()
    admission = Admission(max_requests=1000, max_wait_s=1.0, clock=clock)
    _answer_together(admission, clock, 1, 600.0)
    num_answered = 0
    while admission.is_full(num_arriving=50):
        assert not admission.is_full(num_arriving=15)
        _answer_together(admission, clock, 10, 0.01)
        num_answered += 10
        assert num_answered < 2000
    assert num_answered > 0


def test_requests_that_fail_are_no_answers() -> None:
    clock = Clock()
    admission = Admission(max_requests=1000, max_wait_s=1.0, clock=clock)
    _answer_together(admission, clock, 1, 0.5)
    for _ in range(100):
        with pytest.raises(ValueError, match="bad"), admission.under_way():
            raise ValueError("bad")
    assert (admission.answer_s, admission.num_under_way) == (0.5, 0)
