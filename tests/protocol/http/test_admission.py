"""How many requests a service takes on, by their number and by how fast the last ones were answered."""

from contextlib import ExitStack
from typing import Any

import pytest

from protocol.http.admission import Admission, AdmissionMiddleware
from tests.fakes.clock import Clock


def _answer_together(admission: Admission, clock: Clock, number: int, seconds: float) -> None:
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(admission.running())
        clock.now += seconds


def test_a_service_is_full_when_as_many_are_under_way_as_it_takes() -> None:
    admission = Admission(max_requests=3, max_wait_s=1.0)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(admission.running())
        assert not admission.is_full()
        stack.enter_context(admission.running())
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
            stack.enter_context(admission.running())
        assert not admission.is_full()
        stack.enter_context(admission.running())
        assert admission.is_full()


def test_a_few_requests_are_always_admitted_and_show_that_a_slow_service_is_fast_again() -> None:
    clock = Clock()
    admission = Admission(max_requests=1000, max_wait_s=1.0, clock=clock)
    _answer_together(admission, clock, 1, 600.0)

    def is_full(number: int) -> bool:
        with ExitStack() as stack:
            for _ in range(number):
                stack.enter_context(admission.running())
            found = admission.is_full()
            stack.pop_all()
            admission.num_running = 0
        return found

    num_answered = 0
    while is_full(50):
        assert not is_full(15)
        _answer_together(admission, clock, 10, 0.01)
        num_answered += 10
        assert num_answered < 2000
    assert num_answered > 0


def test_requests_that_fail_are_no_answers() -> None:
    clock = Clock()
    admission = Admission(max_requests=1000, max_wait_s=1.0, clock=clock)
    _answer_together(admission, clock, 1, 0.5)
    for _ in range(100):
        with pytest.raises(ValueError, match="bad"), admission.running():
            raise ValueError("bad")
    assert (admission.answer_s, admission.num_running) == (0.5, 0)


async def _ask(middleware: AdmissionMiddleware, path: str) -> int:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await middleware({"type": "http", "path": path, "method": "POST", "headers": []}, _no_body, send)
    return statuses[0]


async def _no_body() -> Any:
    raise AssertionError("the body was read")


async def _application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_full_service_answers_503_to_its_path_before_the_body_is_read() -> None:
    admission, refused = Admission(1, 10.0), []
    middleware = AdmissionMiddleware(
        _application, "/retrieve", admission, "come back later", 7, lambda: refused.append(1)
    )
    assert await _ask(middleware, "/retrieve") == 200
    with admission.running():
        assert await _ask(middleware, "/retrieve") == 503
        assert await _ask(middleware, "/health") == 200
    assert (await _ask(middleware, "/retrieve"), len(refused)) == (200, 1)
