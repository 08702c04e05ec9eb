"""The table of failures: kind, attempts, breaker and outage, for every answer of a service."""

import pytest

from rollout.neighbours.http.failures import AttemptFailed, FailureKind, failure_of_status, kind_of, opens_breaker

REFUSED, WRONG, FAILED = FailureKind.REFUSED, FailureKind.WRONG, FailureKind.FAILED
BUSY, ABSENT = FailureKind.BUSY, FailureKind.ABSENT
# status: (kind, kind with Retry-After)
STATUSES = {
    None: (ABSENT, BUSY), 200: (FAILED, FAILED), 301: (WRONG, WRONG), 400: (REFUSED, REFUSED), 401: (WRONG, WRONG),
    403: (WRONG, WRONG), 404: (WRONG, WRONG), 408: (ABSENT, BUSY), 413: (REFUSED, REFUSED), 418: (WRONG, WRONG),
    422: (REFUSED, REFUSED), 429: (BUSY, BUSY), 500: (FAILED, FAILED), 501: (WRONG, WRONG), 502: (ABSENT, BUSY),
    503: (ABSENT, BUSY), 504: (ABSENT, BUSY),
}  # fmt: skip


@pytest.mark.parametrize(("status", "kinds"), STATUSES.items())
def test_each_status_has_a_kind(status: int | None, kinds: tuple[FailureKind, FailureKind]) -> None:
    assert (kind_of(status), kind_of(status, "1")) == kinds


@pytest.mark.parametrize(
    ("kind", "max_attempts", "counts", "is_free"),
    [
        (REFUSED, 1, False, False),
        (WRONG, 1, True, False),
        (FAILED, 2, True, False),
        (FailureKind.RAISED, 2, False, False),
        (BUSY, None, False, True),
        (ABSENT, None, True, True),
    ],
)
def test_each_kind_has_its_rule(kind: FailureKind, max_attempts: int | None, counts: bool, is_free: bool) -> None:
    assert (kind.value.max_attempts, kind.value.is_free_in_outage) == (max_attempts, is_free)
    assert opens_breaker(AttemptFailed("x", kind)) is counts


def test_other_errors_count_against_the_service() -> None:
    assert opens_breaker(ZeroDivisionError())


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("2", 2.0),
        ("0.5", 0.5),
        ("3600", 60.0),
        ("-1", 0.0),
        ("nan", 0.0),
        ("1e999", 60.0),
        ("soon", 0.0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 60.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 99999999999 07:28:00 GMT", 0.0),
        ("Jan 0001 EST 99:99:99 99999999999999999999 12:00 24", 0.0),
    ],
)
def test_retry_after_is_read_and_limited(header: str, wait_s: float) -> None:
    failure = failure_of_status("http://a", 503, "busy", header, max_wait_s=60.0)
    assert (failure.kind, failure.retry_after_s) == (BUSY, wait_s)


@pytest.mark.parametrize(
    ("status", "body", "kind", "place"),
    [
        (500, '{"detail": "x", "where": "/my.py:6"}', FailureKind.RAISED, "/my.py:6"),
        (500, '{"detail": "x", "where": null}', FAILED, ""),
        (500, "[" * 100_000, FAILED, ""),
        (503, '{"where": "/my.py:6"}', ABSENT, ""),
    ],
)
def test_500_that_names_a_line_of_the_users_code_is_its_failure(
    status: int, body: str, kind: FailureKind, place: str
) -> None:
    failure = failure_of_status("http://a", status, body, None, 60.0)
    assert (failure.kind, failure.place) == (kind, place)
