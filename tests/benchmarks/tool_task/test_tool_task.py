"""The files of the task that needs a calculator: what demonstrations show is what a conversation consists of."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.quickstart.policy import EOS
from protocol.settings.tools import ToolsSettings
from rewards.exact_match import answer_matches
from rollout.environments.base import Resources, Task
from rollout.environments.tool_use.tool_use import make_tool_use
from rollout.episodes.conversation import SampleTask
from rollout.neighbours.node import Node
from rollout.neighbours.tools.calculator import Calculator
from tests.benchmarks.tool_task.build import build_tool_task
from tests.benchmarks.tool_task.products import Recipe, call
from tests.fakes.engines import TokenizingEngine
from tests.fakes.rollout_fakes import ScriptedScorer, make_keys, make_spec
from tests.rollout.episodes.played import make_player

NUM_ROWS = 400
CARELESS_FROM = 352


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tool_task")
    assert build_tool_task(out, seed=5, recipe=Recipe(num_rows=NUM_ROWS))["warmstart"] == NUM_ROWS
    return out


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_demonstration_is_a_conversation_token_by_token(folder: Path) -> None:
    segments = _rows(folder / "warmstart.jsonl")[0]["segments"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    turns = iter([segments[1]["text"] + EOS, segments[4]["text"] + EOS])
    engine = TokenizingEngine(lambda context: next(turns), tokenizer)
    calculator = Calculator(make_spec(), Node(None, None, "t", make_keys()))
    resources = Resources(2, {"calculator": calculator}, tokenizer)
    environment = make_tool_use(ToolsSettings(names=["calculator"]))
    player = make_player(engine, environment, ScriptedScorer(), resources, max_response_tokens=64)
    asked = segments[0]["text"].removeprefix("<|user|>").split(EOS)[0]
    played = await player.play(SampleTask("g", 0, 1, 1, "train", 7, Task(asked, "", {})))
    shown = [token for one in segments for token in tokenizer.encode(one["text"], add_special_tokens=False)]
    assert played.tokens.tolist() == shown
    assert played.facts.finish == "answer"


def test_careful_demonstrations_are_right_and_careless_ones_mostly_not(folder: Path) -> None:
    rows = _rows(folder / "warmstart.jsonl")
    right = [answer_matches(row["segments"][-2]["text"], [str(_product(row["segments"][0]["text"]))]) for row in rows]
    assert all(right[:CARELESS_FROM])
    assert 0.15 < sum(right[CARELESS_FROM:]) / (NUM_ROWS - CARELESS_FROM) < 0.6
    assert all(call("")[:20] in row["segments"][1]["text"] for row in rows[:CARELESS_FROM])


def test_no_held_out_product_is_trained_on_or_shown(folder: Path) -> None:
    held_out = {row["prompt"] for row in _rows(folder / "eval.jsonl")}
    shown = {
        row["segments"][0]["text"].removeprefix("<|user|>").split(EOS)[0] for row in _rows(folder / "warmstart.jsonl")
    }
    trained = {row["prompt"] for row in _rows(folder / "train.jsonl")}
    assert not held_out & (shown | trained)
    assert len(held_out) == 512
    assert all(_product(row["prompt"]) == int(row["label"]) for row in _rows(folder / "eval.jsonl"))


def test_model_folder_loads(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.vocab_size >= len(AutoTokenizer.from_pretrained(folder / "model"))


def _product(text: str) -> int:
    left, right = text.removeprefix("<|user|>").split(EOS)[0].split(" * ")
    return int(left) * int(right)
