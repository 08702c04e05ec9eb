"""The adapters of the page about TRL's environments and verl's interactions, with classes as their users write them."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.wire.trajectory import Trajectory
from rollout.environments.base import Resources
from rollout.environments.loading import load_environment
from rollout.environments.tool_use.call_formats import choose_reader
from rollout.neighbours.reward_client import NoRewards
from tests.fakes.engines import TokenizingEngine
from tests.fakes.playing_session import playing_session
from tests.fakes.tool_models import FAMILIES

_PAGE = Path(__file__).parents[2] / "docs" / "do" / "borrowed_environments.md"
_MODEL = FAMILIES["hermes"]
_LIMITS: dict[str, Any] = {"max_response_tokens": 2000, "max_context_tokens": 8000, "max_observation_tokens": 2000}
_COUNTER = '''
class Counter:
    def reset(self, start: int, **row) -> str:
        self.total = start
        return f" Begin at {start}."

    def add(self, amount: int) -> str:
        """
        Adds to the total.

        Args:
            amount: How much to add.
        """
        self.total += amount
        return f"total {self.total}"

    async def fail(self) -> str:
        """
        Fails.
        """
        raise ValueError("no more")

    @classmethod
    def most(cls) -> int:
        """
        Says the limit.
        """
        return 99

    @staticmethod
    def sign(number: int) -> str:
        """
        Is no tool in TRL.

        Args:
            number: A number.
        """
        return "-" if number < 0 else "+"

    def get_reward(self) -> float:
        return float(self.total)


'''
_GUESSING = """
log = []


class GuessInteraction:
    def __init__(self, config):
        self.config, self.truths = config, {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        log.append([message["content"] for message in messages])
        is_right = messages[-1]["content"] == self.truths[instance_id]
        return is_right, "Right!" if is_right else f"{self.config['word']}!", 1.0 if is_right else -0.25, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.truths[instance_id]
        log.append(len(self.truths))
"""
_YAML = """
interaction:
  - {class_name: guessing.GuessInteraction, config: {word: Wrong}}
  - {class_name: guessing.GuessInteraction, name: polite, config: {word: Sorry}}
"""


def _adapter(head: str) -> str:
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL) if head in each]
    return str(block)


async def _played(environment: str, turns: list[str], max_turns: int = 4, **lease: Any) -> tuple[Trajectory, str]:
    """Return the sample of a policy that writes these turns, and its text."""
    said = iter(turns)
    engine = TokenizingEngine(lambda context: next(said) + _MODEL.end, _MODEL.tokenizer())
    made = load_environment(environment), Resources(max_turns, tokenizer=engine.tokenizer), NoRewards()
    async with playing_session(engine, *made, **_LIMITS) as playing:
        outcome = await playing.made("e0-a", **lease)
    assert isinstance(outcome, Trajectory), outcome
    return outcome, engine.decode(outcome.tokens.tolist())


async def test_environment_of_trl_is_reset_called_and_asked_for_its_reward(tmp_path: Path) -> None:
    choose_reader("auto", _MODEL.tokenizer())  # vLLM's import may take more than a sample's time here
    (tmp_path / "counter.py").write_text(_COUNTER + _adapter("# below class Counter"))
    calls = [("add", {"amount": 3}), ("add", {"amount": "4"}), ("fail", {}), ("add", {})]
    turns = [_MODEL.call.format(name=name, arguments=json.dumps(given)) for name, given in calls]
    for start in (10, 100):  # each sample has a total of its own
        lease = {"prompt": [{"role": "user", "content": "Go."}], "columns": {"start": start}}
        trajectory, text = await _played(f"{tmp_path / 'counter.py'}:Environment", [*turns, "Done."], **lease)
        assert trajectory.facts.reward_parts == {"environment": start + 7.0}
        assert f"Go. Begin at {start}." in text
        assert re.findall(r'"name": "(\w+)", "description"', text) == ["add", "fail", "most"]
        for result in (f"total {start + 3}", f"total {start + 7}", "{'error': 'no more'}"):
            assert _MODEL.result.format(text=result) in text
        assert "missing 1 required positional argument: 'amount'" in text


@pytest.mark.parametrize(
    ("name", "turns", "answered", "reward"),
    [
        ("guess", ["3", "4"], ["Wrong!"], 0.75),
        ("polite", ["1", "2", "3", "4"], ["Sorry!", "Sorry!"], -0.75),  # two turns are answered, and one more follows
    ],
)
async def test_interaction_of_verl_answers_turns_until_it_or_the_limit_ends_the_sample(
    tmp_path: Path, name: str, turns: list[str], answered: list[str], reward: float
) -> None:
    (tmp_path / "interactions.py").write_text(_adapter("# interactions.py"))
    (tmp_path / "interactions.yaml").write_text(_YAML)
    (tmp_path / "guessing.py").write_text(_GUESSING)
    options = {"name": name, "ground_truth": "4"}
    lease = {"prompt": "2+2=", "columns": {"extra_info": {"interaction_kwargs": options}}}
    trajectory, text = await _played(f"{tmp_path / 'interactions.py'}:Interacting", turns, 2, **lease)
    log = importlib.import_module("guessing").log
    assert trajectory.facts.reward_parts == {"environment": reward}
    said = ["2+2="]
    for turn, reply in zip(turns, [*answered, ""], strict=False):
        said.append(turn)
        assert log.pop(0) == said
        said.append(reply)
    assert log == [0]  # finalized
    shown = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in answered]
    assert text.endswith(
        "".join(f"{turn}<|im_end|>\n{reply}" for turn, reply in zip(turns, [*shown, ""], strict=False)).rstrip()
    )
