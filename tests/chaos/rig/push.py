"""Which servers a rigged run's push still waits for."""

from collections.abc import Iterable


class RigPush:
    """The push under way, if there is one.

    Each method returns whether nobody is waited for any more: the learner may go on. It is said once for each push.
    """

    def __init__(self) -> None:
        self._version: int | None = None
        self._awaited: set[str] = set()

    def begin(self, version: int, servers: Iterable[str]) -> bool:
        """Wait for these servers to have this version."""
        self._version, self._awaited = version, set(servers)
        return self._has_ended()

    def receive(self, server: str, version: int) -> bool:
        """Take in that a server has a version; one of an earlier push, of a learner that died, says nothing."""
        return version == self._version and self.lose(server)

    def lose(self, server: str) -> bool:
        """Wait no longer for a server: it has the version, or is gone."""
        self._awaited.discard(server)
        return self._has_ended()

    def forget(self) -> None:
        """Drop the push: its learner is gone."""
        self._version = None

    def _has_ended(self) -> bool:
        if self._version is None or self._awaited:
            return False
        self._version = None
        return True
