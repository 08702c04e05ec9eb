"""The base class of the sections, and the types of their fields."""

import re
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import parse_qsl

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    HttpUrl,
    ValidationInfo,
    field_validator,
)


def _number_of_text(value: Any) -> Any:
    """Return a command line's text as a number: a Literal of numbers would refuse "2"."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


_SECRET_NAME = re.compile(r"(^|[_-])(key|apikey|token|secret|password|passwd|pwd|auth|sig|signature)$", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Return whether this is probably the name of a secret: API_KEY, token."""
    return _SECRET_NAME.search(name) is not None


def _without_secrets(url: HttpUrl) -> HttpUrl:
    """Raise ValueError for a URL with a user, password or key: URLs appear in settings.yaml, logs and errors."""
    if url.username or url.password:
        raise ValueError("holds a user or password, which would be in settings.yaml and logs. Use headers_env.")
    for name, _ in parse_qsl(url.query or "", keep_blank_values=True):
        if is_secret_name(name):
            raise ValueError(f"holds the secret {name!r}, which would be in settings.yaml and logs. Use headers_env.")
    return url


ServiceUrl = Annotated[HttpUrl, AfterValidator(_without_secrets)]


_LOCAL_STORES = ("file", "local")


def _checked_store(url: str) -> str:
    """Raise ValueError for a text that is not a folder's URL, or holds a user, password or key."""
    kind, separator, place = url.partition("://")
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", kind) or not place:
        raise ValueError("is not a URL of a folder. Give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER.")
    authority, _, query = place.partition("?")
    if ":" in authority.rpartition("@")[0] or query:
        raise ValueError(
            "holds a password or options, which would be in settings.yaml and logs. Give them by the environment, as "
            "the package for this kind of URL reads it."
        )
    if found := re.search(r"[*\[]", place):
        raise ValueError(f"holds {found.group()}, which fsspec reads as a pattern: other folders would be removed too.")
    if kind in _LOCAL_STORES and not place.startswith("/"):
        raise ValueError("is another folder wherever the command is given. Give a whole path: file:///FOLDER.")
    return url


StoreUrl = Annotated[str, AfterValidator(_checked_store)]


ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_number_of_text)]


# Largest number in a message (protocol.wire.trajectory.Count): peers refuse larger ones.
LARGEST_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
CountAboveZero = Annotated[int, Field(gt=0, le=LARGEST_COUNT)]


# 11 days at most: libzmq counts milliseconds in 31 bits.
Seconds = Annotated[float, Field(gt=0.0, le=1e6)]


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


_NUMBER_AS_TEXT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)e[-+]?\d+", re.I)


def _without_number_texts(value: Any) -> Any:
    """Raise ValueError for `reduce_bucket_size: 5e8` in a map of any values: YAML reads a text where no dot is."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(each, str) and _NUMBER_AS_TEXT.fullmatch(each):
            number = repr(float(each))
            written = number if "." in number else number.replace("e", ".0e")
            raise ValueError(f"{each} is a text in YAML, which wants a dot in a number. Write {written}")
        _without_number_texts(each)
    return value


# Settings of another program, whose names and types are not known here.
AnyValues = Annotated[dict[str, Any], AfterValidator(_without_number_texts)]


class Section(BaseModel):
    """A part of the settings: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_value_as_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Raise ValueError for `max_steps: yes`, which would be 1: YAML reads yes, no, on and off as truth values."""
        if _has_truth_value_for_number(value, cls.model_fields[str(field.field_name)].annotation):
            raise ValueError("expected a number; YAML reads yes, no, on, off, true and false as truth values")
        return value


def _has_truth_value_for_number(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return _is_number(kind)
    parts = get_args(kind)
    if isinstance(value, Mapping) and get_origin(kind) is dict:
        return any(isinstance(each, bool) and _is_number(parts[1]) for each in value.values())
    if isinstance(value, list | tuple) and get_origin(kind) in (list, tuple):
        return any(isinstance(each, bool) and _is_number(parts[0]) for each in value)
    return False


def _is_number(kind: Any) -> bool:
    """Return whether a type has only numbers: int, `float | None`, Literal[0, 1]."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Annotated:
        return _is_number(parts[0])
    if get_origin(kind) is Literal:
        return type(parts[0]) is int
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_number, parts))
    return kind in (int, float)
