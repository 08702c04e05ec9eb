"""A clock that a test moves."""


class Clock:
    """Returns `now`, in seconds; the test changes it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
