"""Pushers that are closed when their test ends."""

from collections.abc import Iterator

import pytest

from learner.weights.push import WeightPusher


@pytest.fixture
def pushers() -> Iterator[list[WeightPusher]]:
    made: list[WeightPusher] = []
    yield made
    for pusher in made:
        pusher.close()
