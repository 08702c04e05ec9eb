"""Users' rows and reward functions, unchanged, through every room between them.

A file of rows -> load_prompts -> lease -> session -> episode -> HTTP -> `sluice serve-reward --function FILE`
-> the user's function -> the trajectory's reward. Real but for the engine, which writes the answer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from learner.data.prompt_set import load_prompts
from learner.data.prompts import Prompt
from protocol.settings.data import DataSettings
from protocol.settings.rewards import RewardEndpoint
from protocol.wire.trajectory import Trajectory
from rewards.sample import make_sample
from rewards.user_function import UserFunction
from rollout.neighbours.reward_client import RewardClient
from tests.fakes.engines import ScriptedEngine
from tests.fakes.http_servers import module_serving
from tests.fakes.playing_session import playing_session

GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}
SEARCH_R1 = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "who?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "Ada L."]}},
    "extra_info": {"split": "test", "index": 0},
}
# As verl's own: it chooses by data_source, and has no answer for one that it does not know.
BY_SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source == "openai/gsm8k":
        assert extra_info == {"split": "train", "index": 7, "num_turns": 2}, extra_info
        return float(solution_str == ground_truth)
    if data_source == "nq":
        assert extra_info["split"] == "test"
        return {"score": float(solution_str in ground_truth["target"]), "acc": True}
    raise NotImplementedError(f"no reward for {data_source!r}")
"""


def _parquet(folder: Path, row: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "train.parquet")
    return folder / "train.parquet"


def _jsonl(folder: Path, row: dict[str, Any]) -> Path:
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "train.jsonl"


async def _played(prompt: Prompt, function: Path, answer: str, batch_size: int = 1) -> Trajectory:
    """Return what a leased row becomes when the policy writes `answer` and the user's function judges it."""
    with module_serving("rewards.serve", "--function", str(function)) as (address, _):
        endpoint = RewardEndpoint.model_validate({"name": "mine", "url": address, "batch_size": batch_size})
        engine = ScriptedEngine(lambda context: answer)
        async with RewardClient([endpoint], "sum") as rewards, playing_session(engine, scorer=rewards) as playing:
            made = await playing.made("e0-a", prompt=prompt.prompt, label=prompt.label, columns=prompt.columns)
    assert isinstance(made, Trajectory), made
    return made


@pytest.mark.parametrize("write", [_parquet, _jsonl])
@pytest.mark.parametrize("label_key", ["label", "reward_model"])
@pytest.mark.parametrize(("row", "answer"), [(GSM8K, "2"), (SEARCH_R1, "Ada")])
async def test_verl_row_reaches_a_function_that_chooses_by_data_source(
    tmp_path: Path, write: Callable[[Path, dict[str, Any]], Path], label_key: str, row: dict[str, Any], answer: str
) -> None:
    (tmp_path / "reward.py").write_text(BY_SOURCE)
    (prompt,) = load_prompts(str(write(tmp_path, row)), DataSettings(label_key=label_key))
    assert (await _played(prompt, tmp_path / "reward.py", answer)).facts.reward == 1.0


RETURNS = {
    "bool": "True",
    "int": "1",
    "numpy float": "numpy.float32(1.0)",
    "numpy bool": "numpy.bool_(True)",
    "array of one": "numpy.array([1.0])",
    "dict": "{'score': 1.0, 'acc': True, 'pred': 'text'}",
    "dict of numpy": "{'score': numpy.bool_(True)}",
}


@pytest.mark.parametrize("head", ["def", "async def", "def later(**row):\n    return real(**row)\nasync def"])
async def test_verl_function_may_return_what_verl_takes(tmp_path: Path, head: str) -> None:
    name = "real" if "later" in head else "compute_score"
    signature = "data_source, solution_str, ground_truth, extra_info=None"
    lines = ["import numpy", f"RETURNS = {{{', '.join(f'{k!r}: lambda: {v}' for k, v in RETURNS.items())}}}"]
    lines += [f"{head} {name}({signature}):", "    return RETURNS[data_source]()"]
    if name == "real":
        lines += [f"def compute_score({signature}):", "    return later(data_source=data_source,"]
        lines += ["        solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info)"]
    (tmp_path / "reward.py").write_text("\n".join(lines) + "\n")
    with module_serving("rewards.serve", "--function", str(tmp_path / "reward.py")) as (address, _):
        endpoint = RewardEndpoint.model_validate({"name": "mine", "url": address})
        engine = ScriptedEngine(lambda context: "2")
        async with RewardClient([endpoint], "sum") as rewards, playing_session(engine, scorer=rewards) as playing:
            for number, kind in enumerate(RETURNS):
                made = await playing.made(f"e0-{number}", columns={"data_source": kind})
                assert isinstance(made, Trajectory), (kind, made)
                assert made.facts.reward == 1.0


async def test_openrlhf_function_gets_query_prompt_and_label_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import torch\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    assert queries == ['<bos>What is 1+1?2'] and prompts == ['<bos>What is 1+1?'], (queries, prompts)\n"
        "    return {'rewards': torch.tensor([float(q.endswith(l)) for q, l in zip(queries, labels)]),\n"
        "            'scores': torch.tensor([0.75]), 'extra_logs': {'length': torch.tensor([1.0])}}\n"
    )
    row = {"input": "What is 1+1?", "answer": "2", "source": "mine"}
    settings = DataSettings(prompt_key="input", label_key="answer")
    (prompt,) = load_prompts(str(_jsonl(tmp_path, row)), settings)
    facts = (await _played(prompt, tmp_path / "reward.py", "2")).facts
    assert (facts.reward, facts.reward_score, facts.reward_logs) == (1.0, 0.75, {"mine/length": 1.0})


async def test_numbers_beside_verls_score_reach_the_trajectory(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1.0, 'acc': True, 'pred': solution_str, 'steps': 3}\n"
    )
    (prompt,) = load_prompts(str(_jsonl(tmp_path, GSM8K)), DataSettings(label_key="reward_model"))
    facts = (await _played(prompt, tmp_path / "reward.py", "2", batch_size=4)).facts
    assert (facts.reward, facts.reward_score) == (1.0, None)
    assert facts.reward_logs == {"mine/acc": 1.0, "mine/steps": 3.0}


async def test_own_function_gets_the_rows_columns(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "from rewards.sample import Sample, Score\n"
        "async def score(sample: Sample) -> Score:\n"
        "    return Score(float(sample.columns == {'level': 3, 'tags': ['a']} and sample.response == '2'))\n"
    )
    row = {"prompt": "1+1?", "label": "2", "level": 3, "tags": ["a"]}
    (prompt,) = load_prompts(str(_jsonl(tmp_path, row)), DataSettings())
    assert (await _played(prompt, tmp_path / "reward.py", "2", batch_size=4)).facts.reward == 1.0


async def test_row_of_a_mixture_is_scored_by_trl_functions_as_if_it_were_alone(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "def score(completions, solution, scale=(2.0, 2.0)):\n"
        "    rows = zip(completions, solution, scale)\n"
        "    return [times * float(text == right) for text, right, times in rows]\n"
    )
    function = UserFunction(str(path), "text")
    given: tuple[tuple[str | None, dict[str, Any]], ...] = (
        ("2", {}), (None, {"solution": "2"}), ("3", {}), ("3", {"solution": "2", "scale": 5.0})
    )  # fmt: skip
    rows = [make_sample("p2", "p", label, columns) for label, columns in given]
    alone = [(await function.score([row]))[0].reward for row in rows]
    assert alone == [2.0, 2.0, 0.0, 5.0]
    assert [score.reward for score in await function.score(rows)] == alone
