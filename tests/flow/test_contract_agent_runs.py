"""Whole runs of two steps with OpenRLHF's oldest and newest agent files; tests/contracts/ plays every generation."""

import json

import pytest

from tests.fakes.http_servers import Answer, Received, ScriptedServer, module_serving
from tests.flow.brought_plug_ins import COMPUTE_SCORE_NOW, FIRST_AGENT, NEWEST_AGENT, REWARD_FUNC
from tests.flow.contract_run import NUM_ROWS, calls, lines, parquet, ran, texts, written
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Left

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def test_first_agent_file_on_a_mixture_whose_verl_function_gives_each_source_another_type(
    cluster: FlowCluster, chatting: Bring
) -> None:
    folder = written(chatting.folder / "first", agent=FIRST_AGENT, reward=COMPUTE_SCORE_NOW)
    rows = [{"asked": f"{number}?", "answer": str(number), "data_source": "mine"} for number in range(NUM_ROWS)]
    (folder / "mine.jsonl").write_text(lines(rows))
    mine = {"prompt_key": "asked", "label_key": "answer", "template": "Of {data_source}: {asked}\n"}
    entries = [
        {"path": str(parquet(folder / "gsm8k.parquet", "openai/gsm8k", "4")), "weight": 1},
        {"path": str(parquet(folder / "nq.parquet", "nq", {"target": ["Ada"]})), "weight": 1},
        {"path": str(folder / "mine.jsonl"), "weight": 2, **mine},
    ]
    with module_serving("rewards.serve", "--function", str(folder / "reward.py")) as (address, _):
        left = ran(
            cluster,
            chatting,
            "first",
            {
                "data.train": json.dumps(entries),
                "data.label_key": "reward_model",
                "learner.max_staleness": "0",  # so the steps have the first twelve prompts, whoever is quicker
                "rollout.environment": f"openrlhf_agent:{folder / 'agent.py'}",
                "rewards.endpoints": [{"name": "mine", "url": address}],
            },
            num_groups=6,
        )
    noted = calls(folder)
    assert {each["data_source"] for each in noted if each["kind"] == "score"} >= {"openai/gsm8k", "nq", "mine"}
    assert "4" in [each["label"] for each in noted if each["kind"] == "step"]
    assert any(text.startswith("Of mine: ") for text in texts(left))
    played_twice(left)
    assert all(0.0 < line["reward/part/mine"] < 1.0 for line in steps_of(left))
    assert any("reward/log/mine/acc" in line for line in steps_of(left))


def test_newest_agent_file_with_a_reward_function_and_a_server_in_shards(
    cluster: FlowCluster, chatting: Bring, rewards: ScriptedServer
) -> None:
    folder = written(chatting.folder / "newest", agent=NEWEST_AGENT, reward=REWARD_FUNC)
    rows = [{"input": f"{number} + 1 =", "answer": str(number + 1)} for number in range(NUM_ROWS)]
    (folder / "train.jsonl").write_text(lines(rows))

    def plain(received: Received) -> Answer:
        return Answer([0.5] * len(received.body["query"]))

    with module_serving("rewards.serve", "--function", str(folder / "reward.py")) as (address, _):
        endpoints = [{"name": "function", "url": address}, {"name": "plain", "url": rewards.script_by("plain", plain)}]
        left = ran(
            cluster,
            chatting,
            "newest",
            {
                "data.train": str(folder / "train.jsonl"),
                "data.prompt_key": "input",
                "data.label_key": "answer",
                "rollout.environment": f"openrlhf_agent:{folder / 'agent.py'}",
                "rewards.endpoints": endpoints,
                "rewards.combine": "shard",
            },
        )
    noted = calls(folder)
    assert {each["has_read"] for each in noted if each["kind"] == "step"} == {False, True}
    assert all(label.isdecimal() for each in noted if each["kind"] == "reward" for label in each["labels"])
    played_twice(left)
    assert {line["reward/log/environment/turns"] for line in steps_of(left)} == {2.0}
    parts = [json.loads(part) for (part,) in left.rows("SELECT reward_parts FROM trajectories WHERE kind = 'train'")]
    assert {frozenset(part) for part in parts} == {
        frozenset({"environment", "function"}),
        frozenset({"environment", "plain"}),
    }


def played_twice(left: Left) -> None:
    """Check that every sample has two turns, for each of which the agent gave a quarter."""
    assert {line["length/turns"] for line in steps_of(left)} == {2.0}
    assert {line["reward/part/environment"] for line in steps_of(left)} == {0.5}


def steps_of(left: Left) -> list[dict[str, float]]:
    return [line for line in left.metrics if line["step"] > 0]
