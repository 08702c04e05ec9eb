"""The server's life: start, attach to a run with real services over HTTP, weights, detach, what ends its process."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.node.small_model_files import small_files_digest, write_small_files
from protocol.settings.rewards import RewardEndpoint, RewardsSettings
from protocol.settings.run_spec import EngineRequest, digests_of
from protocol.wire import messages as m
from rollout.neighbours.node import Node
from rollout.server import RolloutServer
from tests.fakes.engines import ScriptedEngine
from tests.fakes.http_servers import Answer, free_address
from tests.rollout.server_stage import ENGINE, KEYS, Stage, attempt, push


async def test_server_describes_itself(stage: Stage) -> None:
    assert await stage.server.describe() == {
        "name": "sluice-rollout-0",
        "fingerprint": EngineRequest(**ENGINE).fingerprint(),
        "is_started": True,
        "is_alive": True,
        "policy_version": 7,
        "run": None,
        "stats": {
            "num_in_flight": 0,
            "num_output_tokens": 7,
            "is_paused": False,
            "max_running": None,
            "cache_tokens": None,
            "shares_prompts": True,
        },
    }


async def test_engine_gets_a_folder_of_its_node_with_the_small_files_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    files = {"config.json": b"{}"}
    folders: list[Path] = []

    async def start(spec: EngineRequest) -> ScriptedEngine:
        folders.append(Path(spec.model))
        return ScriptedEngine(lambda context: "", version=7)

    request = {**ENGINE, "files_digest": small_files_digest(files)}
    with pytest.raises(NeighbourError, match="is missing on this node: the model's configuration was not sent"):
        await RolloutServer("sluice-rollout-0", request, start).start()
    for given in (files, None):  # None: a restarted process on a node that has them
        server = RolloutServer("sluice-rollout-0", request, start)
        described = await server.start(given)
        await server.stop()
        assert described["fingerprint"] == EngineRequest(**request).fingerprint()

    assert {path.name: path.read_bytes() for path in folders[0].iterdir()} == files
    assert folders == [write_small_files(files)] * 2


async def test_attach_refuses_files_of_the_environment_that_are_not_the_commands(stage: Stage, tmp_path: Path) -> None:
    (file := tmp_path / "game.py").write_text(
        "class Game:\n    stop = ()\n    async def reset(self, task): ...\n    async def step(self, turn): ...\n"
    )
    run = stage.run(environment=f"{file}:Game", code=digests_of([file]) | {str(tmp_path / "not here.py"): "a1"})
    await stage.server.attach(run)
    file.write_text(f"{file.read_text()}    # edited\n")
    with pytest.raises(SettingsError, match=r"game\.py on node .* is not the file with which the command started: it"):
        await stage.server.attach({**run, "incarnation": 2})


async def test_attach_asks_the_clusters_services_with_its_token(stage: Stage) -> None:
    described = await stage.server.attach(stage.run())

    assert described["run"]["run_id"] == "run"
    assert described["run"]["incarnation"] == 1
    for name in ("reward", "retrieve"):
        (request,) = stage.services.received[name]
        assert request.headers["authorization"] == "Bearer secret-token-secret"


async def test_attach_does_not_ask_a_retriever_that_the_environment_does_not_use(stage: Stage) -> None:
    await stage.server.attach(stage.run(environment="single_turn"))
    assert stage.services.received["retrieve"] == []


async def test_users_endpoints_do_not_get_the_clusters_token(stage: Stage) -> None:
    url = stage.services.script("mine", Answer({"rewards": [1.0]}))
    rewards = RewardsSettings(endpoints=[RewardEndpoint(name="mine", url=url)])  # type: ignore[arg-type]
    await stage.server.attach(stage.run(rewards=rewards.model_dump(mode="json")))

    assert "authorization" not in stage.services.received["mine"][0].headers
    assert stage.services.received["reward"] == []


async def test_attach_names_a_reward_endpoint_that_is_down(stage: Stage) -> None:
    address = free_address()
    rewards = RewardsSettings(endpoints=[RewardEndpoint(name="mine", url=f"{address}/score")])  # type: ignore[arg-type]
    with pytest.raises(NeighbourError, match=rf"^reward:mine: .*{address}/score") as caught:
        await stage.server.attach(stage.run(rewards=rewards.model_dump(mode="json")))
    assert caught.value.boundary == "reward:mine"


async def test_attach_names_a_retriever_that_is_down(stage: Stage) -> None:
    address = free_address()
    retriever = {"url": f"{address}/retrieve", "topk": 1}
    with pytest.raises(NeighbourError, match=rf"^retriever: .*{address}/retrieve"):
        await stage.server.attach(stage.run(retriever=retriever))


async def test_attach_that_fails_leaves_the_attached_run_alone(stage: Stage) -> None:
    await stage.server.attach(stage.run())
    await push(stage.server, 1)
    with pytest.raises(SettingsError, match=r"rollout.environment = nowhere"):
        await stage.server.attach(stage.run(2, environment="nowhere"))

    described = await stage.server.describe()
    assert (described["run"]["incarnation"], described["policy_version"]) == (1, 1)


async def test_attach_refuses_tools_for_a_model_without_a_chat_template(stage: Stage) -> None:
    tools = {"names": ["calculator"]}
    with pytest.raises(SettingsError, match=r"policy.model has no chat template"):
        await stage.server.attach(stage.run(environment="tools", tools=tools))


async def test_attach_without_any_reward_service_says_what_to_do(stage: Stage) -> None:
    stage.node = Node(None, stage.node.retriever_url, stage.node.token, KEYS)
    with pytest.raises(OperatorError, match=r"rewards.endpoints is empty .* bundled reward .* gives_reward = True"):
        await stage.server.attach(stage.run())


async def test_later_start_of_a_run_replaces_the_earlier_and_is_given_its_trajectories(stage: Stage) -> None:
    await stage.begin()
    stage.coordinator.lease("e0-a")
    await stage.coordinator.next(m.TrajectoryDone)
    stage.coordinator.acknowledge("e0-a", 0, "accepted")
    await asyncio.sleep(0.05)

    described = await stage.server.attach(stage.run(2))
    stage.coordinator.stamp["incarnation"] = 2
    await stage.coordinator.welcome()

    assert described["policy_version"] is None
    assert described["run"]["num_kept"] == 1
    assert (await stage.coordinator.next(m.TrajectoryDone)).incarnation == 2


async def test_another_run_is_given_nothing(stage: Stage) -> None:
    await stage.begin()
    stage.coordinator.lease("e0-a")
    await stage.coordinator.next(m.TrajectoryDone)

    described = await stage.server.attach(stage.run(run_id="other"))
    assert (described["run"]["run_id"], described["run"]["num_kept"]) == ("other", 0)


async def test_run_of_that_name_in_another_folder_is_given_nothing(stage: Stage) -> None:
    await stage.server.attach(stage.run())
    await push(stage.server, 1)
    await stage.coordinator.welcome()
    stage.coordinator.lease("e0-a")
    await stage.coordinator.next(m.TrajectoryDone)
    again = await stage.server.attach(stage.run())
    other = await stage.server.attach(stage.run(coordinator_address="tcp://127.0.0.1:1"))
    assert (again["run"]["num_kept"], other["run"]["num_kept"]) == (1, 0)


async def test_detach_stops_samples_and_keeps_the_engine(stage: Stage) -> None:
    await stage.server.attach(stage.run())
    await push(stage.server, 1)
    stage.engine.is_slow = True
    await stage.coordinator.welcome()
    stage.coordinator.lease("e0-a", num_samples=4)
    async with asyncio.timeout(20.0):
        while stage.engine.stats.num_in_flight != 4:
            await asyncio.sleep(0.005)

    await stage.server.detach()

    described = await stage.server.describe()
    assert (described["run"], described["is_alive"], stage.engine.stats.num_in_flight) == (None, True, 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seed": "x"}, "settings: RunSpec: seed: Input should be a valid integer"),
        ({"token": 1}, "settings: RunSpec: token: Extra inputs are not permitted, got 1"),
    ],
)
async def test_attach_refuses_a_run_it_does_not_understand(stage: Stage, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(problem)):
        await stage.server.attach(stage.run(**changes))


async def test_process_ends_when_the_engine_died(stage: Stage) -> None:
    stage.engine.is_alive = False
    async with asyncio.timeout(20.0):
        while not stage.deaths:
            await asyncio.sleep(0.01)
    assert stage.deaths == ["its engine died or hangs"]
    assert (await stage.server.describe())["is_alive"] is False


async def test_process_ends_when_its_session_is_wrong(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await stage.server.attach(stage.run())
    await push(stage.server, 1)
    monkeypatch.setattr(ScriptedEngine, "stats", None)  # the next heartbeat finds no figures in it
    await stage.coordinator.welcome()
    async with asyncio.timeout(20.0):
        while not stage.deaths:
            await asyncio.sleep(0.01)
    assert stage.deaths == ["its session failed: unhandled errors in a TaskGroup (1 sub-exception)"]


async def test_calls_before_start_say_so() -> None:
    server = RolloutServer("s0", ENGINE)
    assert (await server.describe())["is_started"] is False
    with pytest.raises(NeighbourError, match=r"^s0: its engine was not started$"):
        await server.prepare(attempt(), {})


async def test_start_passes_on_why_the_engine_did_not_come_up(tmp_path: Path) -> None:
    async def start(spec: EngineRequest) -> ScriptedEngine:
        raise SettingsError("settings: vLLM refuses the engine settings")

    server = RolloutServer("s0", ENGINE, start)
    with pytest.raises(SettingsError, match=r"vLLM refuses"):
        await server.start()


async def test_engine_is_started_once_however_often_it_is_asked(stage: Stage) -> None:
    assert (await stage.server.start())["is_started"] is True
    assert stage.num_starts == 1


async def test_stopped_server_watches_its_engine_no_more(stage: Stage) -> None:
    await stage.server.stop()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
