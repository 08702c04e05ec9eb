"""The kinds of failed HTTP attempts, and their rules for retries, breaker and outages.

    kind     cause                               attempts  opens the breaker  free in an outage
    REFUSED  400, 413, 422                       1         no                 no
    WRONG    redirect, 401, 404, other statuses  1         yes                no
    FAILED   500, unusable reply                 2         yes                no
    RAISED   500 that names the line that raised 2         no                 no
    BUSY     429, or ABSENT with Retry-After     policy    no                 yes
    ABSENT   no answer, 408, 502, 503, 504       policy    yes                yes

"free in an outage": while other requests fail too, the failure uses no attempt.
"""

import email.utils
import json
import time
from dataclasses import dataclass
from enum import Enum

_TEXT_LENGTH = 500  # kept characters of an error page


@dataclass(frozen=True)
class _Rule:
    max_attempts: int | None  # failures that end a call; None: the policy's limit
    opens_breaker: bool
    is_free_in_outage: bool


class FailureKind(Enum):
    """Reason of a failed attempt."""

    REFUSED = _Rule(1, opens_breaker=False, is_free_in_outage=False)
    WRONG = _Rule(1, opens_breaker=True, is_free_in_outage=False)
    # One 500 is often a flaky call in a user's function; a second one is a bug.
    FAILED = _Rule(2, opens_breaker=True, is_free_in_outage=False)
    # The service works, the user's code does not: the run must learn that soon, not in the breaker's pauses.
    RAISED = _Rule(2, opens_breaker=False, is_free_in_outage=False)
    BUSY = _Rule(None, opens_breaker=False, is_free_in_outage=True)
    ABSENT = _Rule(None, opens_breaker=True, is_free_in_outage=True)


_KINDS = {
    400: FailureKind.REFUSED, 413: FailureKind.REFUSED, 422: FailureKind.REFUSED,
    200: FailureKind.FAILED, 500: FailureKind.FAILED,
    429: FailureKind.BUSY,
    None: FailureKind.ABSENT, 408: FailureKind.ABSENT, 502: FailureKind.ABSENT, 503: FailureKind.ABSENT,
    504: FailureKind.ABSENT,
}  # fmt: skip


def kind_of(status: int | None, retry_after: str | None = None) -> FailureKind:
    """Return the kind of a failure. status: of the answer; 200 for an unusable reply; None without an answer."""
    kind = _KINDS.get(status, FailureKind.WRONG)
    return FailureKind.BUSY if kind is FailureKind.ABSENT and retry_after else kind


class AttemptFailed(Exception):
    """One attempt failed."""

    def __init__(
        self,
        detail: str,
        kind: FailureKind = FailureKind.ABSENT,
        status: int | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.status = status  # HTTP status; None: no answer
        self.retry_after_s = retry_after_s  # requested pause
        self.text = ""  # first 500 characters of the answer
        self.place = ""  # file and line of the user's code that raised; empty: not named
        self.is_free = False  # True: not counted as an attempt, during an outage
        self.waits_for_breaker = False  # True: the breaker times the retry


def opens_breaker(error: Exception) -> bool:
    """Return whether an error counts against the service."""
    return not isinstance(error, AttemptFailed) or error.kind.value.opens_breaker


def failure_of_status(url: str, status: int, text: str, retry_after: str | None, max_wait_s: float) -> AttemptFailed:
    """Return the failure for an HTTP status other than 200. max_wait_s: limit of its Retry-After."""
    place = _place_in(text) if status == 500 else ""
    kind = FailureKind.RAISED if place else kind_of(status, retry_after)
    wait_s = min(_seconds_of(retry_after), max_wait_s) if retry_after and kind is FailureKind.BUSY else 0.0
    failure = AttemptFailed(f"{url} answered {status}: {text[:_TEXT_LENGTH]}", kind, status, wait_s)
    failure.text, failure.place = text[:_TEXT_LENGTH], place
    return failure


def _place_in(text: str) -> str:
    """Return the file and line in the answer of a service whose user's code raised; "": the answer names none."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    place = answer.get("where") if isinstance(answer, dict) else None
    return place[:_TEXT_LENGTH] if isinstance(place, str) else ""


def _seconds_of(retry_after: str) -> float:
    """Return a Retry-After number or HTTP date as seconds from now; 0 for anything else."""
    try:
        seconds = float(retry_after)
        return seconds if seconds > 0 else 0.0  # false for nan
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except Exception:  # untrusted header; the parser also raises OverflowError and others
        return 0.0
