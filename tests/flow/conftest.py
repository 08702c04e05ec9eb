"""One real cluster for the tests of this room, and a user with a model, prompts and reward services of their own."""

import shutil
from collections.abc import Iterator

import pytest

from deploy.node.home import Home
from tests.fakes.http_servers import ScriptedServer, scripted_server
from tests.flow.contract_run import chatting_user
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, bring, score, score_slowly


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowCluster]:
    """Yield a cluster that runs; everything of it is ended afterwards."""
    running = FlowCluster(tmp_path_factory.mktemp("cluster"))
    try:
        started = running.start()
        assert started.returncode == 0, started.stderr
        yield running
    finally:
        running.stop()
        shutil.rmtree(Home(running.home).ray_folder, ignore_errors=True)  # logs, which a stop leaves to be read


@pytest.fixture(scope="session")
def rewards() -> Iterator[ScriptedServer]:
    """Yield the user's own HTTP server; its scripts `fast` and `slow` are reward services."""
    with scripted_server() as server:
        server.script_by("fast", score)
        server.script_by("slow", score_slowly)
        yield server


@pytest.fixture(scope="session")
def user(rewards: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Bring:
    return bring(tmp_path_factory.mktemp("user"), f"{rewards.address}/fast")


@pytest.fixture(scope="session")
def slow_user(user: Bring) -> Bring:
    """The same user, with the reward service that takes its time."""
    return Bring(user.folder, user.model, user.reward_url.replace("fast", "slow"))


@pytest.fixture(scope="session")
def chatting(user: Bring, tmp_path_factory: pytest.TempPathFactory) -> Bring:
    """A user whose model speaks in Hermes's form."""
    return chatting_user(tmp_path_factory.mktemp("contracts"), user.reward_url)
