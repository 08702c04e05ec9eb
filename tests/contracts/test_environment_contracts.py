"""Users' environments and retrievers, unchanged, through every room between them.

A file with a class -> Services -> session -> episode -> HTTP -> a retriever in each shape that is about -> tokens. Real
but for the engine, which writes by script.
"""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from protocol.errors import SettingsError
from protocol.settings.tools import ToolsSettings
from protocol.wire.trajectory import Trajectory
from rollout.environments.base import Turn
from rollout.neighbours.node import Node
from rollout.neighbours.services import Services
from tests.fakes.engines import ScriptedEngine, TokenizingEngine
from tests.fakes.http_servers import Answer, ScriptedServer, scripted_server
from tests.fakes.playing_session import playing_session
from tests.fakes.rollout_fakes import make_keys, make_spec
from tests.fakes.tool_models import FAMILIES

ROOMY = {"max_response_tokens": 200, "max_context_tokens": 4096}
GUIDE_EXAMPLE = """
from rollout.environments.base import Resources, Step, Task, Turn


class Game:
    stop = ("</move>",)
    gives_reward = True

    def __init__(self, resources: Resources) -> None:
        self.moves = 0

    async def reset(self, task: Task) -> str:
        return task.prompt

    async def step(self, turn: Turn) -> Step:
        self.moves += 1
        return Step(is_done=True, reward=1.0) if "e4" in turn.content else Step("Try again: ")
"""
SEARCHING = """
from rollout.environments.base import Step


class Asking:
    stop = ()
    uses_retriever = True

    def __init__(self, resources):
        self.resources = resources
        self.found = None

    async def reset(self, task):
        return [{"role": "user", "content": f"{task.prompt} {task.label} {task.columns['hint']}"}]

    async def step(self, turn):
        if self.found is not None:
            return Step(is_done=True, finish="answer")
        self.found = await self.resources.search(turn.text)
        return Step(" / ".join(self.found) + f" of {self.resources.max_turns}")
"""
COMPARING = """
from rollout.environments.base import Step


class Exact:
    stop = ()

    def __init__(self, resources):
        pass

    async def reset(self, task):
        return [{"role": "user", "content": task.prompt}]

    async def step(self, turn):
        return Step(is_done=True, reward=float(turn.content == "4"))
"""


async def _played(server: ScriptedServer, environment: str, engine: ScriptedEngine, **lease: Any) -> Trajectory:
    """Return what a sample of an environment, named as in settings, becomes among this node's own services."""
    spec = make_spec(environment=environment)
    node = Node(f"{server.address}/reward", f"{server.address}/retrieve", "secret-token-secret", make_keys())
    async with Services(spec, node) as services:
        await services.check()
        made = services.make_environment, services.resources, services.rewards
        async with playing_session(engine, *made) as playing:
            trajectory = await playing.made("e0-a", **lease)
    assert isinstance(trajectory, Trajectory), trajectory
    return trajectory


def _text(trajectory: Trajectory) -> str:
    return "".join(map(chr, trajectory.tokens)).removeprefix("\1")


async def test_example_of_the_guide_is_played(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "do" / "environments.md").read_text()
    assert GUIDE_EXAMPLE.strip() in guide
    (tmp_path / "my_env.py").write_text(GUIDE_EXAMPLE)
    engine = ScriptedEngine(lambda context: "e4</move>" if "again" in context else "d4</move>")
    with scripted_server() as server:
        trajectory = await _played(server, f"{tmp_path / 'my_env.py'}:Game", engine)
    assert _text(trajectory) == "2+2=d4</move>Try again: e4</move>"
    assert trajectory.loss_mask.tolist() == [0] * 5 + [1] * 9 + [0] * 11 + [1] * 9
    assert trajectory.facts.reward_parts == {"environment": 1.0}


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_turns_content_equals_an_answer_that_its_text_only_contains(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]
    (tmp_path / "my_env.py").write_text(COMPARING)
    engine = TokenizingEngine(lambda context: f"4{model.end}", model.tokenizer())
    with scripted_server() as server:
        server.script("reward", Answer({"rewards": [0.5]}))
        trajectory = await _played(server, f"{tmp_path / 'my_env.py'}:Exact", engine)
    assert engine.decode(trajectory.tokens.tolist()).endswith(f"4{model.end}")
    assert trajectory.facts.reward_parts["environment"] == 1.0


PASSAGE = '"Ada"\nwrote notes'
REPLIES = {
    "with scores": {"result": [[{"document": {"id": "1", "contents": PASSAGE}, "score": 1.25}]]},
    "without scores": {"result": [[{"id": "1", "contents": PASSAGE}]]},
    "plain text": {"result": [[PASSAGE]]},
    "more than topk": {"result": [[{"document": {"id": "1", "contents": PASSAGE}, "score": 1.0}] * 9]},
}


@pytest.mark.parametrize("shape", REPLIES)
async def test_retriever_of_any_known_shape_answers_the_search_loop(shape: str) -> None:
    with scripted_server() as server:
        server.script("reward", Answer({"rewards": [0.5]}))
        server.script("retrieve", Answer(REPLIES[shape]))
        engine = ScriptedEngine(lambda context: "<answer>B</answer>" if "<info" in context else "<search>A</search>")
        trajectory = await _played(server, "search", engine)
        checked, asked = server.received["retrieve"]
        num_found = 3 if shape == "more than topk" else 1
    found = "\n".join([" Ada: wrote notes"] * num_found)
    assert _text(trajectory) == f"2+2=<search>A</search><information>{found}</information><answer>B</answer>"
    assert trajectory.facts.finish == "answer"
    assert asked.body == {"queries": ["A"], "topk": 3, "return_scores": True}
    assert asked.headers["authorization"] == checked.headers["authorization"] == "Bearer secret-token-secret"


async def test_class_that_says_uses_retriever_searches_as_before(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(SEARCHING)
    with scripted_server() as server:
        server.script("reward", Answer({"rewards": [0.5]}))
        server.script("retrieve", Answer(REPLIES["plain text"]))
        lease = {"prompt": "who?", "label": "Ada", "columns": {"hint": "poet"}}
        trajectory = await _played(server, f"{tmp_path / 'my_env.py'}:Asking", ScriptedEngine(lambda _: "Ada"), **lease)
    assert _text(trajectory) == f"[user]who? Ada poet[assistant]Ada{PASSAGE} of 4Ada"


async def test_tools_by_settings_alone_are_called_through_the_models_template() -> None:
    model = FAMILIES["hermes"]
    said = iter([("calculator", '{"expression": "6*7"}'), ("search", '{"query": "Ada"}')])

    def write(context: str) -> str:
        call = next(said, None)
        return f"42{model.end}" if call is None else model.call.format(name=call[0], arguments=call[1]) + model.end

    engine = TokenizingEngine(write, model.tokenizer())
    spec = make_spec(environment="tools", **ROOMY)
    spec = spec.model_copy(update={"tools": ToolsSettings(names=["search", "calculator"])})
    with scripted_server() as server:
        server.script("reward", Answer({"rewards": [0.5]}))
        server.script("retrieve", Answer(REPLIES["plain text"]))
        node = Node(f"{server.address}/reward", f"{server.address}/retrieve", "secret-token-secret", make_keys())
        async with Services(spec, node, engine.tokenizer) as services:
            await services.check()
            made = services.make_environment, services.resources, services.rewards
            async with playing_session(engine, *made, **ROOMY) as playing:
                trajectory = await playing.made("e0-a", prompt="6 times 7?")
        (scored,) = server.received["reward"][1:]
    assert isinstance(trajectory, Trajectory), trajectory
    assert scored.body["query"][0].endswith(f"{model.result.format(text='Ada: wrote notes')}42{model.end}")
    assert model.result.format(text="42") in scored.body["query"][0]
    assert scored.body["query"][0].index('"search"') < scored.body["query"][0].index('"calculator"')
    assert trajectory.facts.finish == "answer"


async def test_call_before_an_end_that_only_generation_config_names_is_run() -> None:
    tokenizer = FAMILIES["hermes"].tokenizer()
    tokenizer.add_tokens([AddedToken("<|eom|>", special=False, normalized=False)])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}[{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})]{% endfor %}"
        "{{ '<|eom|>' if m.tool_calls else '<|im_end|>' }}{% endfor %}"
    )
    spec = make_spec(environment="tools", **ROOMY)
    spec = spec.model_copy(update={"tools": ToolsSettings(names=["calculator"])})
    ends = {tokenizer.convert_tokens_to_ids("<|eom|>")}
    with scripted_server() as server:
        server.script("reward", Answer({"rewards": [0.5]}))
        node = Node(f"{server.address}/reward", None, "secret-token-secret", make_keys())
        async with Services(spec, node, tokenizer, ends) as services:
            await services.check()
            environment = services.make_environment(services.resources)
            step = await environment.step(Turn('[calculator(expression="6*7")]<|eom|>', "stop"))
    assert isinstance(step.observation, list)
    assert step.observation[0]["content"] == "42"


async def test_tool_that_there_is_none_of_is_named_before_anything_starts(tmp_path: Path) -> None:
    wanting = SEARCHING.replace("uses_retriever = True", "requires = {'serach'}")
    (tmp_path / "my_env.py").write_text(wanting)
    name = f"{tmp_path / 'my_env.py'}:Asking"
    with pytest.raises(SettingsError) as refused:
        Services(make_spec(environment=name), Node("http://127.0.0.1:1", None, "t", make_keys()))
    problem = "its class requires the tool 'serach'. There are: calculator, python, search."
    expected = f"settings: rollout.environment = {name}: {problem}"
    assert str(refused.value) == expected
