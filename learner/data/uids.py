"""A prompt's uid: a hash of data set name, row number and content, so that merged sets never collide.

It is the hash of a JSON text, which never changes: another spelling of the same row would be another prompt to a run
that goes on.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from json import encoder as json_encoder
from typing import Any

UID_BYTES = 10


def make_uid(name: str, number: int, prompt: Any, label: Any) -> str:
    """Return the uid of a row. name: of its file. number: its line or row there, counted from 1."""
    text = "".join(_chunks([name, number, prompt, label], 0))
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * UID_BYTES]


def _make_chunks() -> Callable[[Any, int], Sequence[str]]:
    """Return what writes JSON with sorted keys, and anything that JSON does not know as its text.

    json.JSONEncoder makes itself a new one of these for every text, which takes a third of its time.
    """
    make = getattr(json_encoder, "c_make_encoder", None)
    if make is None:  # Python built without its C extension
        encoder = json.JSONEncoder(sort_keys=True, check_circular=False, default=str)
        return lambda value, _: list(encoder.iterencode(value))
    made: Callable[[Any, int], Sequence[str]] = make(
        None, str, json_encoder.encode_basestring_ascii, None, ": ", ", ", True, False, True
    )
    return made


_chunks = _make_chunks()
