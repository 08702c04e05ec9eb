"""The stage of the rollout server's tests."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.http_servers import ScriptedServer, scripted_server
from tests.rollout.server_stage import Stage


@pytest.fixture
def services() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


@pytest.fixture
async def stage(services: ScriptedServer) -> AsyncIterator[Stage]:
    stage = Stage(services)
    await stage.server.start()
    yield stage
    stage.coordinator.close()  # first: a session waits for the answer to its last counts
    await stage.server.stop()
