"""Names of models, samplers and requests, and of their files. A name from a client is no path."""

import re
from collections.abc import Sequence

from deploy.tinker.wire import RequestError

_NAME = re.compile(r"[\w.-]{1,200}")


def model_id(session: str, seq: int) -> str:
    """Return the name that the client computes too."""
    return f"{session}:train:{seq}"


def sampler_id(session: str, seq: int) -> str:
    return f"{session}:sample:{seq}"


def request_id(owner: str, seq: int) -> str:
    return f"{owner}#{seq}"


def second_request(owner: str, seq: int | str) -> RequestError:
    """Return the refusal of a second request with a number."""
    text = f"{owner} has another request with the number {seq}."
    return RequestError(f"{text} Do two processes use copies of one client? Make one in each.")


def check_base(name: str | None, served: Sequence[str]) -> None:
    """Raises: RequestError for a base model that is not served. None: the one that is."""
    if name is not None and name not in served:
        raise RequestError(f"base_model = {name} is not served. Use {served[0]}: one service has one base model.")


def file_name(owner: str) -> str:
    """Return a model's name as a file name. Raises: RequestError for a name that no model here has."""
    return checked_name(owner.replace(":", "-"))


def checked_name(name: str) -> str:
    """Return a client's name. Raises: RequestError for one that is no plain file name."""
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise RequestError(f"The name {name!r} cannot be a file. Use letters, digits, dots, dashes and underscores.")
    return name
