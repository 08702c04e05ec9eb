"""What an agent is told when it gets no answer, in OpenAI's form of an error."""

from typing import Any

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 410: "session_ended_error"}


class Refused(Exception):
    """A request that is not answered with what it asks for."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """param: the field that is wrong. code: OpenAI's word for it, where it has one."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the reply's body."""
        return error_body(self.status, str(self), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
