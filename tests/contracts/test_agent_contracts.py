"""Agent files of OpenRLHF's four generations, unchanged, from the setting that names them to the tokens.

Each file is written as its generation's examples are: the parameters, what comes back, tensors, names that it imports.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from protocol.errors import SettingsError
from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from protocol.wire.trajectory import Trajectory
from rollout.environments.base import Resources, Task
from rollout.environments.openrlhf.load import load_agent
from rollout.episodes.conversation import SampleTask
from rollout.neighbours.node import Node
from rollout.neighbours.services import Services
from tests.fakes.engines import TokenizingEngine
from tests.fakes.playing_session import playing_session
from tests.fakes.rollout_fakes import make_keys, make_spec
from tests.fakes.tokenizer_families import tokenizer_of
from tests.fakes.tool_models import FAMILIES
from tests.rollout.episodes.played import make_player

# Each asks for the label twice: a wrong answer gets 0.25 and another turn, the right one 1.
FIRST = """
from typing import Any, Dict, Tuple
import torch

tries = 0

async def step(state, action, label, **kwargs) -> Tuple[float, Dict[str, Any], bool]:
    global tries
    tries += 1
    if label in action:
        return torch.tensor([1.0]), state + action + f" Right after {tries}.", True, {}
    return torch.tensor(0.25), state + action + f"\\nWrong {tries}.<|im_end|>\\n", False, {}
"""
SECOND = """
import torch

tries = 0

async def step(observation, action, label, **kwargs):
    global tries
    tries += 1
    done = label in action
    reward = torch.tensor(1.0 if done else 0.25)
    following = observation + action + f"\\nWrong {tries}.<|im_end|>\\n"
    return {
        "rewards": reward,
        "scores": reward,
        "next_observation": following,
        "done": done,
        "sampling_params": kwargs.get("sampling_params", None),
        "extra_logs": {"tries": torch.tensor(float(tries))},
    }
"""
THIRD = """
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.tries = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.tries += 1
        assert states["observation_text"].endswith("2+2=" if self.tries == 1 else "Wrong 1.<|im_end|>\\n")
        done = states["label"] in states["action_text"]
        reward = torch.tensor([1.0 if done else 0.25])
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": f"\\nWrong {self.tries}.<|im_end|>\\n",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"tries": self.tries},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""
FOURTH = (
    THIRD.partition("class AgentExecutor")[0]
    .replace("AgentExecutorBase, AgentInstanceBase", "AgentInstanceBase, MultiTurnAgentExecutor")
    .replace("async def __init__", "def __init__")
    + """class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
)
GENERATIONS = {"first": FIRST, "second": SECOND, "third": THIRD, "fourth": FOURTH}


def _spec(path: Path, **rollout: Any) -> RunSpec:
    limits = {"max_response_tokens": 200, "max_context_tokens": 4096, **rollout}
    return make_spec(environment=f"openrlhf_agent:{path}", **limits)


async def _played(path: Path, turns: list[str], groups: tuple[str, ...] = ("e0-a",), **lease: Any) -> Any:
    """Return what became of one sample per group, in order, and the engine; every turn ends as the model's do."""
    engine = TokenizingEngine(
        lambda context: turns[context.count("Wrong")] + "<|im_end|>", FAMILIES["hermes"].tokenizer()
    )
    spec = _spec(path)
    async with Services(spec, Node(None, None, "t", make_keys()), engine.tokenizer) as services:
        await services.check()
        made = services.make_environment, services.resources, services.rewards
        limits = {"max_response_tokens": 200, "max_context_tokens": 4096}
        async with playing_session(engine, *made, **limits) as playing:
            return [await playing.made(group, **lease) for group in groups], engine


@pytest.mark.parametrize("generation", GENERATIONS)
async def test_agent_file_of_each_generation_plays_its_conversation(tmp_path: Path, generation: str) -> None:
    path = tmp_path / "agent_func.py"
    path.write_text(GENERATIONS[generation])
    played, engine = await _played(path, ["five", "4"], ("e0-a", "e0-b"))
    for trajectory in played:  # the second would count on from the first, if they shared what the file keeps
        assert isinstance(trajectory, Trajectory), trajectory
        assert engine.decode(trajectory.tokens.tolist()) == "2+2=five<|im_end|>\nWrong 1.<|im_end|>\n4<|im_end|>"
        told = trajectory.tokens[~trajectory.loss_mask.astype(bool)].tolist()
        assert engine.decode(told) == "2+2=\nWrong 1.<|im_end|>\n"
        # The agent writes the turns' ends itself: they are control tokens.
        assert told.count(engine.tokenizer.eos_token_id) == 1
        assert trajectory.facts.reward == 1.25
        assert trajectory.facts.reward_parts == {"environment": 1.25}
        assert trajectory.facts.reward_score == (None if generation == "first" else 1.0)
        tries = {} if generation == "first" else {"environment/tries": 2.0}
        assert trajectory.facts.reward_logs == {"environment/cut_replies": 0.0} | tries
        assert (trajectory.facts.finish, trajectory.facts.num_turns) == ("stop", 2)


async def test_agent_is_given_chat_messages_as_text_and_they_go_on_untouched(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(FOURTH.replace('endswith("2+2="', 'endswith("assistant\\n"'))
    prompt = [{"role": "user", "content": "2+2=<|im_end|>"}]
    (trajectory,), engine = await _played(path, ["4"], prompt=prompt)
    assert isinstance(trajectory, Trajectory), trajectory
    start = trajectory.facts.num_prompt_tokens
    prompt_text = "<|im_start|>user\n2+2=<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert engine.decode(trajectory.tokens[:start].tolist()) == prompt_text
    # What the row holds stays letters: only the template's own end of turn is one token.
    assert trajectory.tokens[:start].tolist().count(engine.tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("prompt", ["2+2=", [{"role": "user", "content": "2+2="}]])
@pytest.mark.parametrize("hint", ["", " Think."])
async def test_prompt_has_no_first_token_beside_the_templates(tmp_path: Path, prompt: Any, hint: str) -> None:
    path = tmp_path / "agent.py"
    path.write_text(f"""
from openrlhf.utils.agent import AgentInstanceBase
class AgentInstance(AgentInstanceBase):
    async def reset(self, states):
        return {{"observation": states["observation"] + {hint!r}}}
    async def step(self, states):
        return {{"rewards": 1.0, "environment_feedback": "", "done": True}}
""")
    tokenizer = copy.deepcopy(tokenizer_of("llama3"))
    first = "<|begin_of_text|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.convert_tokens_to_ids(first))]
    )
    resources = Resources(
        3, render=lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    )
    player = make_player(
        TokenizingEngine(lambda context: "4<|eot_id|>", tokenizer),
        load_agent(path),
        resources=resources,
        max_context_tokens=4096,
    )
    made = await player.play(SampleTask("g", 0, 1, 1, "train", 7, Task(prompt, "4", {})))

    text = tokenizer.decode(made.tokens[: made.facts.num_prompt_tokens].tolist())
    assert text.count(first) == (0 if isinstance(prompt, str) else 1)
    assert text.endswith(hint)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (FIRST.replace("state + action + f", "f"), "does not begin with observation + action"),
        (SECOND.replace('kwargs.get("sampling_params", None)', "7"), "step returned sampling_params"),
        (FOURTH.replace('"done": done,', ""), "expected a dict with 'done'"),
        (FOURTH.replace("self.tries += 1", "raise KeyError('board')"), "KeyError: 'board'"),
        (FOURTH.replace('return {"observation"', 'return {"observations"'), "reset returned dict"),
        (
            FOURTH.replace('"done": done,', '"done": done, "environment_images": ["picture"],'),
            "step returned environment_images, and the policy reads text only",
        ),
    ],
)  # fmt: skip
async def test_agent_that_does_otherwise_fails_its_sample_with_the_reason(
    tmp_path: Path, written: str, problem: str
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(written)
    (failed,), _ = await _played(path, ["five", "4"])
    assert isinstance(failed, m.SampleFailed), failed
    assert failed.boundary == "environment"
    assert problem in failed.detail


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("x = 1", "it has neither a class AgentInstance nor an `async def step(observation, action, label)`."),
        ("def step(observation, action, label): pass", "it has neither a class AgentInstance nor"),
        ("import nothing_of_that_name", "it cannot be loaded: ModuleNotFoundError"),
        (
            FOURTH + "\n    async def execute(self, prompt, label, **more):\n        return await self.llm(prompt)\n",
            "AgentExecutor has an `execute` of its own, which drives the engine itself.",
        ),
    ],
)
def test_file_that_is_no_agent_is_refused(tmp_path: Path, written: str, problem: str) -> None:
    path = tmp_path / "agent.py"
    path.write_text(written)
    with pytest.raises(SettingsError) as refused:
        load_agent(path)
    assert str(refused.value).startswith(f"settings: rollout.environment = openrlhf_agent:{path}: ")
    assert problem in str(refused.value)
