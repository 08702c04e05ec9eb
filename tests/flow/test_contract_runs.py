"""Whole runs of two steps with plug-ins written for other systems, unchanged: real commands, engine and learner.

The plug-ins are in brought_plug_ins.py. A few steps of supervised fine-tuning teach a random model to search. The runs
share one engine: their model and limits are the same. A call of verl's tools is more than such a model learns in
seconds: tests/contracts plays it with an engine that writes it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.fakes.http_servers import Answer, Received, ScriptedServer, module_serving
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.tool_models import FAMILIES
from tests.flow.brought_plug_ins import AGENT, COMPUTE_SCORE, GUESS, REWARD_FUNC, TOOLS
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import GROUP_SIZE, GROUPS_PER_STEP, Bring, Left, each_trained_once

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

HERMES = FAMILIES["hermes"]
NUM_ROWS = 16


@pytest.fixture(scope="module")
def chatting(user: Bring, tmp_path_factory: pytest.TempPathFactory) -> Bring:
    """A user whose model speaks in Hermes's form."""
    folder = tmp_path_factory.mktemp("contracts")
    model = make_tiny_model(folder / "model", tied=True, width=0.03)
    tokenizer = HERMES.tokenizer()
    tokenizer.save_pretrained(model)
    for name in ("config.json", "generation_config.json"):
        written = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**written, "eos_token_id": tokenizer.eos_token_id}))
    return Bring(folder, model, user.reward_url)


def test_rows_and_reward_function_of_verl_with_its_tools_offered(cluster: FlowCluster, chatting: Bring) -> None:
    folder = _written(chatting.folder / "verl", reward=COMPUTE_SCORE, guess_in_a_run=GUESS)
    (folder / "tools.yaml").write_text(TOOLS)
    rows = [
        _parquet(folder / "gsm8k.parquet", "openai/gsm8k", "4"),
        _parquet(folder / "nq.parquet", "nq", {"target": ["Ada"]}),
    ]
    with module_serving("rewards.serve", "--function", str(folder / "reward.py")) as (address, _):
        left = _ran(
            cluster,
            chatting,
            "verl",
            "",
            {
                "data.train": json.dumps([str(path) for path in rows]),
                "data.eval": "null",
                "data.label_key": "reward_model",
                "rollout.environment": f"verl_tools:{folder / 'tools.yaml'}",
                "rewards.endpoints": [{"name": "mine", "url": address, "batch_size": 4}],
            },
        )
    calls = _calls(folder)
    # The check at the start asks with a made-up row, which a function that chooses by data_source refuses.
    scored = [call for call in calls if call["kind"] == "score" and call["data_source"]]
    assert {call["data_source"] for call in scored} == {"openai/gsm8k", "nq"}
    assert all(call["extra"]["split"] == "train" for call in scored)
    told = [HERMES.tokenizer().decode(sample["tokens"][: sample["num_prompt_tokens"]]) for sample in left.samples]
    assert all('"name": "guess"' in text for text in told)


def test_agent_file_and_reward_servers_of_openrlhf(
    cluster: FlowCluster, chatting: Bring, rewards: ScriptedServer
) -> None:
    folder = _written(chatting.folder / "openrlhf", agent=AGENT, reward=REWARD_FUNC)
    (folder / "train.jsonl").write_text(
        _lines([{"input": f"{i} + 1 =", "answer": str(i + 1)} for i in range(NUM_ROWS)])
    )

    def old(received: Received) -> Answer:
        return Answer({"rewards": [float("0" in query) for query in received.body["query"]]})

    with module_serving("rewards.serve", "--function", str(folder / "reward.py")) as (address, _):
        endpoints = [{"name": "new", "url": address}, {"name": "old", "url": rewards.script_by("old_style", old)}]
        left = _ran(
            cluster,
            chatting,
            "openrlhf",
            "",
            {
                "data.train": str(folder / "train.jsonl"),
                "data.eval": "null",
                "data.prompt_key": "input",
                "data.label_key": "answer",
                "rollout.environment": f"openrlhf_agent:{folder / 'agent.py'}",
                "rewards.endpoints": endpoints,
            },
        )
    calls = _calls(folder)
    assert sum(call["kind"] == "step" for call in calls) >= 2 * 2 * GROUPS_PER_STEP * GROUP_SIZE
    assert all(label.isdecimal() for call in calls if call["kind"] == "reward" for label in call["labels"])
    steps = [line for line in left.metrics if line["step"] > 0]
    assert {line["turns_mean"] for line in steps} == {2.0}
    assert {line["reward/environment"] for line in steps} == {0.5}
    assert all(line["reward/new"] > 0.0 and "reward/old" in line for line in steps)


def test_retriever_and_rows_of_search_r1(cluster: FlowCluster, chatting: Bring, rewards: ScriptedServer) -> None:
    def retrieve(received: Received) -> Answer:
        document = {"id": "7", "contents": '"Ada"\nAda wrote the first program.'}
        return Answer({"result": [[{"document": document, "score": 3.5}] for _ in received.body["queries"]]})

    folder = _written(chatting.folder / "search_r1")
    train = _parquet(folder / "train.parquet", "nq", {"target": ["Ada", "Ada L."]})
    left = _ran(
        cluster,
        chatting,
        "search_r1",
        "<search>who</search>",
        {
            "data.train": str(train),
            "data.eval": "null",
            "data.label_key": "reward_model",
            "rollout.environment": "search",
            "retriever.url": rewards.script_by("retrieve", retrieve),
            "rewards.endpoints": "[]",  # the cluster's own service
        },
    )
    asked = [received.body for received in rewards.received["retrieve"]]
    assert {query for body in asked for query in body["queries"]} >= {"who"}
    assert all(set(body) == {"queries", "topk", "return_scores"} for body in asked)
    read = [HERMES.tokenizer().decode(sample["tokens"]) for sample in left.samples]
    assert any("<information> Ada: Ada wrote the first program.</information>" in text for text in read)
    assert all("reward/bundled" in line for line in left.metrics if line["step"] > 0)


def _ran(
    cluster: FlowCluster,
    user: Bring,
    name: str,
    taught: str,
    given: Mapping[str, object],
) -> Left:
    """Return what a run of two steps left, once the audit has passed. taught: what the policy writes first."""
    limits = {"max_response_tokens": 80, "max_context_tokens": 768, "max_turns": 2}
    overrides: dict[str, object] = {f"rollout.{key}": str(value) for key, value in limits.items()}
    overrides |= {"run.max_steps": "2", "rollout.temperature": "0.3", **given}
    if taught:
        sft = user.folder / f"{name}_sft.jsonl"
        sft.write_text(_lines([{"segments": _taught(prompt, taught)} for prompt in _prompts()]))
        warm = {"data": str(sft), "max_steps": "120", "rows_per_step": "4", "lr": "0.003", "lr_warmup_steps": "10"}
        overrides |= {f"policy.warm_start.{key}": value for key, value in warm.items()}
    command = cluster.run(*user.options(name, overrides))
    assert command.returncode == 0, command.stdout + command.stderr
    left = user.left(name)
    assert left.trained == each_trained_once(2)
    audit = cluster.audit(str(left.folder))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    return left


def _taught(prompt: str, text: str) -> list[dict[str, Any]]:
    """Return a row of supervised fine-tuning."""
    return [{"text": prompt, "weight": 0.0}, {"text": text, "weight": 1.0}]


def _prompts() -> list[str]:
    """Return some of the run's prompts, as the template writes them."""
    render = HERMES.tokenizer().apply_chat_template
    chats = [[{"role": "user", "content": _QUESTION + "?" * number}] for number in range(0, NUM_ROWS, 4)]
    return [render(chat, add_generation_prompt=True, tokenize=False) for chat in chats]


_QUESTION = "who wrote it"


def _parquet(path: Path, source: str, truth: Any) -> Path:
    """Write rows as verl and Search-R1 prepare them."""
    told = {"guess": {"create_kwargs": {"ground_truth": "4"}}}
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": _QUESTION + "?" * i}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": i, "need_tools_kwargs": True, "tools_kwargs": told},
        }
        for i in range(NUM_ROWS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _written(folder: Path, **modules: str) -> Path:
    folder.mkdir()
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def _calls(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
