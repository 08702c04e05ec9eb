"""A whole run of two steps with OpenRLHF's newest agent file; tests/contracts/ plays every generation."""

import json

import pytest

from tests.fakes.http_servers import Answer, Received, ScriptedServer, module_serving
from tests.flow.brought_plug_ins import COMPUTE_SCORE_NOW, NEWEST_AGENT
from tests.flow.contract_run import NUM_ROWS, calls, lines, parquet, ran, texts, written
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def test_agent_file_on_a_mixture_with_a_verl_function_by_source_and_a_server_in_shards(
    cluster: FlowCluster, chatting: Bring, rewards: ScriptedServer
) -> None:
    folder = written(chatting.folder / "agents", agent=NEWEST_AGENT, reward=COMPUTE_SCORE_NOW)
    rows = [{"asked": f"{number}?", "answer": str(number), "data_source": "mine"} for number in range(NUM_ROWS)]
    (folder / "mine.jsonl").write_text(lines(rows))
    mine = {"prompt_key": "asked", "label_key": "answer", "template": "Of {data_source}: {asked}\n"}
    entries = [
        {"path": str(parquet(folder / "gsm8k.parquet", "openai/gsm8k", "4")), "weight": 1},
        {"path": str(parquet(folder / "nq.parquet", "nq", {"target": ["Ada"]})), "weight": 1},
        {"path": str(folder / "mine.jsonl"), "weight": 2, **mine},
    ]

    def plain(received: Received) -> Answer:
        return Answer([0.5] * len(received.body["query"]))

    with module_serving("rewards.serve", "--function", str(folder / "reward.py")) as (address, _):
        endpoints = [{"name": "mine", "url": address}, {"name": "plain", "url": rewards.script_by("plain", plain)}]
        left = ran(
            cluster,
            chatting,
            "agents",
            {
                "data.train": json.dumps(entries),
                "data.label_key": "reward_model",
                "learner.max_staleness": "0",  # so the steps have the first twelve prompts, whoever is quicker
                "rollout.environment": f"openrlhf_agent:{folder / 'agent.py'}",
                "rewards.endpoints": endpoints,
                "rewards.combine": "shard",
            },
            num_groups=6,
        )
    noted = calls(folder)
    assert {each["data_source"] for each in noted if each["kind"] == "score"} >= {"openai/gsm8k", "nq", "mine"}
    played = [each for each in noted if each["kind"] == "step"]
    assert "4" in [each["label"] for each in played]
    assert {each["has_read"] for each in played} == {False, True}
    assert any(text.startswith("Of mine: ") for text in texts(left))
    steps = [line for line in left.metrics if line["step"] > 0]
    assert {line["length/turns"] for line in steps} == {2.0}
    assert {line["reward/log/environment/turns"] for line in steps} == {2.0}
    assert {line["reward/part/environment"] for line in steps} == {0.5}  # the agent gives a quarter for each turn
    assert all(0.0 < line["reward/part/mine"] < 1.0 for line in steps)
    assert any("reward/log/mine/acc" in line for line in steps)
    parts = [json.loads(part) for (part,) in left.rows("SELECT reward_parts FROM trajectories WHERE kind = 'train'")]
    assert {frozenset(part) for part in parts} == {
        frozenset({"environment", "mine"}),
        frozenset({"environment", "plain"}),
    }
