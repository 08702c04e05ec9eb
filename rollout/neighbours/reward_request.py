"""A finished sample as reward services are asked about it: the contract's body and key."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from typing import Any
from urllib.parse import quote

from protocol.errors import NeighbourError
from protocol.one_line import one_line

# A value that JSON has no word for: its key is left out.
_MISSING = object()


@dataclass(frozen=True)
class ScoreRequest:
    """A finished sample."""

    key: str  # the same whenever this very sample is sent again
    prompt: str  # decoded, special tokens kept
    response: str  # all that followed the prompt, observations too
    label: Any  # the data row's, any JSON
    columns: Mapping[str, Any] = field(default_factory=dict)  # the data row's other columns


def check_label(label: Any) -> None:
    """Raise NeighbourError("prompt") for a label that JSON cannot carry; a row's label is never changed on its way.

    So it is asked before anything is sent: in a batch it would cost its neighbours their rewards.
    """
    try:
        json.dumps(label, allow_nan=False, default=_as_text)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"its label {one_line(repr(label), 80)} cannot be sent to a reward service: {error}"
        raise NeighbourError("prompt", f"{problem}. Change the row.") from None


def body_of(requests: Sequence[ScoreRequest]) -> bytes:
    """Return the JSON that is posted. Services that do not know `columns` ignore it; without columns it is left out.

    Of columns what JSON cannot carry is left out, but for a missing number (NaN), which is null there.
    """
    body = {
        "query": [request.prompt + request.response for request in requests],
        "prompts": [request.prompt for request in requests],
        "labels": [request.label for request in requests],
    }
    if any(request.columns for request in requests):
        body["columns"] = [_plain(dict(request.columns)) for request in requests]
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, default=_as_text)
    return text.encode(errors="replace")


def key_of(requests: Sequence[ScoreRequest]) -> str:
    """Return the Idempotency-Key: the sample's own, in characters that a header may hold; of a batch a hash of all."""
    if len(requests) == 1:
        return quote(requests[0].key, safe="/:;,=.+-_ #")
    return hashlib.sha256("\n".join(request.key for request in requests).encode()).hexdigest()


def _as_text(value: Any) -> str:
    """Return a date or time as ISO 8601 text. Raises: TypeError for what JSON has no word for."""
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"JSON has no {type(value).__name__}")


def _plain(value: Any) -> Any:
    """Return a value as JSON can carry it, or _MISSING."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else _MISSING
    if isinstance(value, dict):
        parts = {key: _plain(part) for key, part in value.items() if isinstance(key, str)}
        return {key: part for key, part in parts.items() if part is not _MISSING}
    if isinstance(value, list | tuple):
        # Places in a list have a meaning: what cannot be carried is null there.
        return [None if part is _MISSING else part for part in map(_plain, value)]
    if value is None or isinstance(value, str | int | bool):
        return value
    return value.isoformat() if isinstance(value, date | time) else _MISSING
