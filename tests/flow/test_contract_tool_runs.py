"""A whole run in which the policy calls a user's tool behind a URL and one of an MCP server, then answers.

Its rows are gsm8k's, prepared; math_answer scores; a curriculum passes over what is easy.
"""

import asyncio
import sys
from typing import Any

import pyarrow.parquet
import pytest

from learner.data.prepare.command import main as prepare
from tests.fakes import mcp_server
from tests.fakes.http_servers import Answer, ScriptedServer, module_serving
from tests.flow.contract_run import HERMES, call, ran, texts, tokenizer, written
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Says.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ROWS = [{"question": f"{number} pens and none?", "answer": f"So.\n#### {number}"} for number in (3, 4)]


def test_tools_of_url_and_mcp_server_on_prepared_rows_scored_by_math_answer(
    cluster: FlowCluster, chatting: Bring, rewards: ScriptedServer
) -> None:
    folder = written(chatting.folder / "tools")
    own = folder / "train-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), own)
    assert prepare(["gsm8k", "--from", str(folder), "--to", str(folder / "to")]) == 0
    weather = {**WEATHER, "url": rewards.script("weather", Answer({"result": "dry"}))}
    things = {"name": "things", "command": [sys.executable, mcp_server.__file__], "tools": ["echo"]}
    with module_serving("rewards.serve", "--scorer", "math_answer") as (address, _):
        left = ran(
            cluster,
            chatting,
            "tools",
            {
                "data.train": str(folder / "to" / "train.parquet"),
                # Every mean is easy: the second epoch is passed over, and then a row is drawn all the same.
                "data.curriculum.easy": "-1.0",
                "data.curriculum.every": "2",
                "learner.max_staleness": "0",
                "rollout.environment": "tools",
                "rollout.max_turns": "3",
                "tools.names": "[]",
                "tools.http": [weather],
                "tools.mcp": [things],
                "rewards.endpoints": [{"name": "mine", "url": address}],
            },
            taught=[conversation(row["prompt"]) for row in rows_of(folder)] * 2,
        )
    assert {"city": "Ulm"} in [received.body for received in rewards.received["weather"]]
    read = "".join(texts(left))
    assert HERMES.result.format(text="dry") in read
    assert HERMES.result.format(text="hi") in read
    steps = [line for line in left.metrics if line["step"] > 0]
    assert max(line["reward/part/mine"] for line in steps) > 0.0
    assert sum(line["data/curriculum_easy"] for line in steps) >= len(ROWS)


def rows_of(folder: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "to" / "train.parquet").to_pylist()
    return rows


def conversation(prompt: list[dict[str, str]]) -> list[str]:
    """Return what is said when the policy calls one tool, then the other, and answers."""
    listed = asyncio.run(mcp_server.server.list_tools())
    (echo,) = [tool for tool in listed if tool.name == "echo"]
    told = [WEATHER, {"name": "echo", "description": echo.description, "parameters": echo.input_schema}]
    offered = [{"type": "function", "function": function} for function in told]
    begun = tokenizer().apply_chat_template(prompt, tools=offered, add_generation_prompt=True, tokenize=False)
    first, second = call("weather", "city", "Ulm"), call("echo", "text", "hi")
    results = [HERMES.result.format(text=text) for text in ("dry", "hi")]
    return [begun, first, results[0], second, results[1], f"#### {prompt[0]['content'][0]}{HERMES.end}"]
