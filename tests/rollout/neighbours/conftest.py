"""A server with scripted answers, for the tests of one file."""

from collections.abc import Iterator

import pytest

from tests.fakes.http_servers import ScriptedServer, scripted_server


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted
