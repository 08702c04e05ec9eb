"""Ports for tests that must name one before anybody listens there."""

import random

from protocol.errors import OperatorError
from protocol.http.listen import bind

# Below those that the kernel gives to whoever asks for any (from 32768 on Linux): between the choice of a port and its
# use another test's connection or listener would take one of these now and then.
_FIRST, _LAST = 20_000, 32_000
_given: set[int] = set()
# Not the shared one, which a test may have seeded.
_random = random.SystemRandom()


def free_port() -> int:
    """Return a port of loopback where nothing listens, and that this process was not given before."""
    while True:
        port = _random.randint(_FIRST, _LAST)
        if port in _given:
            continue
        try:
            bind("test", "127.0.0.1", port).close()
        except OperatorError:
            continue
        _given.add(port)
        return port
