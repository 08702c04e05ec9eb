"""Whole runs of two steps with plug-ins written for other systems, unchanged: real commands, engine and learner.

The plug-ins are in brought_plug_ins.py.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.fakes.http_servers import Answer, Received, ScriptedServer, module_serving
from tests.flow.brought_plug_ins import COMPUTE_SCORE, GUESS, TOOLS
from tests.flow.contract_run import HERMES, call, calls, parquet, prompts, ran, texts, tokenizer, written
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import GROUPS_PER_STEP, Bring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def test_rows_reward_function_and_tool_of_verl(cluster: FlowCluster, chatting: Bring) -> None:
    folder = written(chatting.folder / "verl", reward=COMPUTE_SCORE, guess_in_a_run=GUESS)
    (folder / "tools.yaml").write_text(TOOLS)
    rows = [
        parquet(folder / "gsm8k.parquet", "openai/gsm8k", "4"),
        parquet(folder / "nq.parquet", "nq", {"target": ["Ada"]}),
    ]
    offered = [tool["tool_schema"] for tool in yaml.safe_load(TOOLS)["tools"]]
    with module_serving("rewards.serve", "--function", str(folder / "reward.py")) as (address, _):
        left = ran(
            cluster,
            chatting,
            "verl",
            {
                "data.train": json.dumps([str(path) for path in rows]),
                "data.label_key": "reward_model",
                "rollout.environment": f"verl_tools:{folder / 'tools.yaml'}",
                "rewards.endpoints": [{"name": "mine", "url": address, "batch_size": 4}],
            },
            taught=[(prompt, call("guess", "answer", "4")) for prompt in prompts(offered)],
        )
    noted = calls(folder)
    # The check at the start asks with a made-up row, which a function that chooses by data_source refuses.
    scored = [each for each in noted if each["kind"] == "score" and each["data_source"]]
    assert {each["data_source"] for each in scored} == {"openai/gsm8k", "nq"}
    assert all(each["extra"]["split"] == "train" for each in scored)
    assert all('"name": "guess"' in text for text in texts(left))
    made = [each for each in noted if each["kind"] == "execute"]
    assert {"kind": "execute", "truth": "4", "parameters": {"answer": "4"}} in made
    assert any(HERMES.result.format(text="no") in text for text in texts(left))


def test_retriever_and_rows_of_search_r1(cluster: FlowCluster, chatting: Bring, rewards: ScriptedServer) -> None:
    """Its replies in each form that such servers give: with scores, without, as plain texts, more than asked for.

    The rank and the server take turns.
    """
    number = itertools.count()

    def retrieve(received: Received) -> Answer:
        form = next(number) % 4
        document = {"id": "7", "contents": f'"Ada"\nAda wrote program {form}.'}
        found = [
            [{"document": document, "score": 3.5}],
            [document],
            [document["contents"]],
            [{"document": document}] * 9,
        ][form]
        return Answer({"result": [found for _ in received.body["queries"]]})

    folder = written(chatting.folder / "search_r1")
    train = parquet(folder / "train.parquet", "nq", {"target": ["Ada", "Ada L."]})
    left = ran(
        cluster,
        chatting,
        "search_r1",
        {
            "placement.devices": "shared",
            "weights.backend": "gloo",
            "data.train": str(train),
            "data.label_key": "reward_model",
            "rollout.environment": "search",
            "retriever.url": rewards.script_by("retrieve", retrieve),
            "retriever.batch_size": "1",
            "retriever.topk": "2",
            "rewards.endpoints": "[]",  # the cluster's own service
        },
        taught=[(prompt, "<search>who</search>") for prompt in prompts()],
    )
    asked = [received.body for received in rewards.received["retrieve"]]
    assert {query for body in asked for query in body["queries"]} >= {"who"}
    assert all(set(body) == {"queries", "topk", "return_scores"} for body in asked)
    assert {body["topk"] for body in asked if "who" in body["queries"]} == {2}
    assert len(asked) > 4  # each form, behind the check at the start
    assert left.rows("SELECT boundary, detail FROM failures") == []
    read = [text for text in texts(left) if "<information>" in text]
    assert read
    assert all("<information> Ada: Ada wrote program " in text for text in read)
    most = 2 * 2  # retriever.topk passages of each of two searches
    assert max(text.count("Ada wrote program") for text in read) <= most
    masks = [mask for sample in left.samples for mask in masks_over(" Ada: Ada wrote program ", sample)]
    assert len(masks) >= 4
    assert {bit for mask in masks for bit in mask} == {0}
    assert left.states == {"trained": 2 * GROUPS_PER_STEP}
    assert max(turns for (turns,) in left.rows("SELECT num_turns FROM trajectories")) > 1
    assert all("reward/part/bundled" in line for line in left.metrics if line["step"] > 0)


def masks_over(text: str, sample: Mapping[str, Any]) -> list[list[int]]:
    """Return the loss mask over each place of a sample where the text is."""
    wanted, tokens = tokenizer().encode(text), sample["tokens"]
    places = [slice(start, start + len(wanted)) for start in range(len(tokens) - len(wanted) + 1)]
    return [[int(bit) for bit in sample["loss_mask"][place]] for place in places if tokens[place] == wanted]
