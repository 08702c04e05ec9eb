"""A wish for more or fewer rollout servers of a run that goes on, and the run's answer: two files in its folder."""

import secrets
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.disk.files import replace_file

WISH, ANSWER = "servers_wish.json", "servers_answer.json"
_Record = TypeVar("_Record", bound=BaseModel)


class ServerWish(BaseModel):
    """What an operator wants."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str  # of the wish
    change: int  # so many servers more; below 0: fewer


class ServerAnswer(BaseModel):
    """What the run has to say of a wish."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str  # of the wish
    text: str  # a sentence for the operator
    is_last: bool  # False: it is at it
    is_refused: bool = False  # True: nothing was changed


def wish_servers(folder: Path, change: int) -> ServerWish:
    """Leave a wish in a run's folder; returns it. Raises: OSError."""
    wish = ServerWish(id=secrets.token_hex(8), change=change)
    _write(folder / WISH, wish)
    return wish


def read_wish(folder: Path) -> ServerWish | None:
    return _read(folder / WISH, ServerWish)


def answer_wish(folder: Path, answer: ServerAnswer) -> None:
    """Raises: OSError."""
    _write(folder / ANSWER, answer)


def read_answer(folder: Path) -> ServerAnswer | None:
    return _read(folder / ANSWER, ServerAnswer)


def _write(path: Path, record: BaseModel) -> None:
    replace_file(path, record.model_dump_json().encode())


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
