"""A request to change a running run's number of rollout servers, and the run's reply: two files in its folder."""

import secrets
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.disk.files import replace_file

REQUEST, REPLY = "servers_request.json", "servers_reply.json"
_Record = TypeVar("_Record", bound=BaseModel)


class ScaleRequest(BaseModel):
    """A change that an operator asks for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str  # random name of the request
    change: int  # number of servers to add; below 0: to remove


class ScaleReply(BaseModel):
    """The run's reply to a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str  # id of the request
    text: str  # sentence for the operator
    is_last: bool  # False: the change is under way
    is_refused: bool = False  # True: nothing was changed


def write_request(folder: Path, change: int) -> ScaleRequest:
    """Write a request into a run's folder and return it. Raises: OSError."""
    request = ScaleRequest(id=secrets.token_hex(8), change=change)
    _write(folder / REQUEST, request)
    return request


def read_request(folder: Path) -> ScaleRequest | None:
    return _read(folder / REQUEST, ScaleRequest)


def write_reply(folder: Path, reply: ScaleReply) -> None:
    """Write a reply into a run's folder. Raises: OSError."""
    _write(folder / REPLY, reply)


def read_reply(folder: Path) -> ScaleReply | None:
    return _read(folder / REPLY, ScaleReply)


def _write(path: Path, record: BaseModel) -> None:
    replace_file(path, record.model_dump_json().encode())


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
