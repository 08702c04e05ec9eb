"""The three kinds of error: the operator is wrong, a neighbour failed, we are wrong (any other exception)."""


class OperatorError(Exception):
    """The operator can fix this: the message names the value, the expected form and the change to make.

    A command prints the message without a traceback and exits with `exit_code`.
    """

    exit_code = 1


class SettingsError(OperatorError):
    """A setting is wrong; nothing has been started. Exit code 2."""

    exit_code = 2


class NeighbourError(Exception):
    """Another process or service failed at a named boundary ("reward:exact_match", "retriever", "engine").

    It is counted and shown; the lease goes back. It never becomes a reward, an observation or training data.
    """

    def __init__(self, boundary: str, detail: str, place: str = "") -> None:
        """place: file and line of the user's code that raised; empty: no such code did."""
        super().__init__(f"{boundary}: {detail}")
        self.boundary = boundary
        self.detail = detail
        self.place = place

    def __reduce__(self) -> tuple[type["NeighbourError"], tuple[str, str, str]]:
        # Pickling keeps the constructor's arguments; Exception would keep only the joined text.
        return type(self), (self.boundary, self.detail, self.place)


class AwayError(NeighbourError):
    """The neighbour's process is gone or unreachable; Ray restarts it when there is room."""


class FrameError(Exception):
    """A message from another process violates the schema: `path` names the field, `reason` the kind."""

    def __init__(self, path: str, problem: str, reason: str = "invalid") -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
        self.reason = reason

    def __reduce__(self) -> tuple[type["FrameError"], tuple[str, str, str]]:
        # Pickling keeps the constructor's arguments; Exception would keep only the joined text.
        return type(self), (self.path, self.problem, self.reason)
