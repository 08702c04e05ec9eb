"""Ways by which somebody else's words reach the policy: each is a conversation in which `text` comes in by that way."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from protocol.settings.tools import ToolsSettings
from protocol.wire.trajectory import Trajectory
from rollout.engine.generation import Generation, Sampling
from rollout.environments.base import MakeEnvironment, Observation, Prompt, Resources, SingleTurn, Step, Task, Turn
from rollout.environments.search import Search
from rollout.environments.tool_use.tool_use import make_tool_use
from rollout.episodes.conversation import SampleTask
from tests.fakes.engines import TokenizingEngine
from tests.fakes.rollout_fakes import ScriptedScorer
from tests.fakes.tokenizer_families import FAMILIES, tokenizer_of
from tests.rollout.episodes.played import make_player

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
_SETTINGS = ToolsSettings(names=["calculator"], call_format="hermes")
_ROOMY = {"max_response_tokens": 500, "max_context_tokens": 1 << 20, "max_observation_tokens": 1 << 19}


class LookTool:
    """A tool of no arguments: it answers by a given text."""

    def __init__(self, reply: str = "fox", described: str = "Looks.", parameter: str = "") -> None:
        self._reply = reply
        properties = {parameter: {"type": "string", "description": described}} if parameter else {}
        form = {"type": "object", "properties": properties}
        function = {"name": "look", "description": described, "parameters": form}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    async def __call__(self, *args: Any) -> Any: ...

    async def answer(self, arguments: Mapping[str, Any]) -> str:
        return self._reply


class Noting:
    """Answers the first turn with a column of the row, by itself or between control tokens of its own."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources, head: str = "", tail: str = "") -> None:
        self._note = ""
        self._head, self._tail = head, tail
        self._is_last = False

    async def reset(self, task: Task) -> Prompt:
        self._note = str(task.columns["note"])
        return task.prompt

    async def step(self, turn: Turn) -> Step:
        if self._is_last:
            return Step(is_done=True)
        self._is_last = True
        return Step(Observation(self._note, self._head, self._tail) if self._head else self._note)


class NotedEngine(TokenizingEngine):
    """Keeps the tokens of each turn that it wrote."""

    wrote: list[int]

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        generation = await super().generate(prompt_tokens, sampling, request_id)
        self.wrote += generation.tokens
        return generation


async def played(
    family: str,
    environment: MakeEnvironment,
    prompt: Any = None,
    first_turn: str = "hello",
    resources: Resources | None = None,
    columns: Mapping[str, Any] | None = None,
    **limits: int,
) -> tuple[Trajectory, list[int]]:
    """Return the trajectory of two turns or one, and the tokens that the policy wrote in it."""
    tokenizer = tokenizer_of(family)
    left = iter([first_turn, "the dog<answer></answer>" + FAMILIES[family].end])
    engine = NotedEngine(lambda context: next(left), tokenizer)
    engine.wrote = []
    resources = resources or Resources(3, {}, tokenizer)
    player = make_player(engine, environment, ScriptedScorer(), resources, **{**_ROOMY, **limits})
    task = Task(prompt or [{"role": "user", "content": "hello"}], "A", columns or {})
    trajectory = await player.play(SampleTask("g", 0, 1, 1, "train", 7, task))
    return trajectory, engine.wrote


async def _calling(family: str, tool: LookTool, **limits: int) -> tuple[Trajectory, list[int]]:
    resources = Resources(3, {"calculator": tool}, tokenizer_of(family))
    turn = CALL + FAMILIES[family].end
    return await played(family, make_tool_use(_SETTINGS), first_turn=turn, resources=resources, **limits)


async def _searching(family: str, text: str, **limits: int) -> tuple[Trajectory, list[int]]:
    async def search(query: str) -> list[str]:
        return [text, f'"{text}"\n{text}']

    resources = Resources(3, {"search": search})
    return await played(family, Search, first_turn="<search>dog</search>", resources=resources, **limits)


async def _prompted(family: str, *messages: dict[str, Any]) -> tuple[Trajectory, list[int]]:
    return await played(family, SingleTurn, [{"role": "user", "content": "hello"}, *messages])


async def _in_parts(family: str, text: str) -> tuple[Trajectory, list[int]]:
    """Have the text come in parts of one message, none of which holds a whole name: the template joins them."""
    parts = [{"type": "text", "text": text[at : at + 3]} for at in range(0, min(len(text), 300), 3)]
    return await _prompted(family, {"role": "user", "content": parts})


async def _with_earlier_call(family: str, text: str) -> tuple[Trajectory, list[int]]:
    called = {"name": text, "arguments": {text: [text, {text: text}]}}
    asked = {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": called}]}
    return await _prompted(family, asked, {"role": "tool", "name": text, "content": text})


async def _between_own_words(family: str, text: str) -> tuple[Trajectory, list[int]]:
    names = FAMILIES[family].names
    return await played(family, lambda r: Noting(r, names[1], names[-1]), columns={"note": text})


Way = Callable[[str, str], Awaitable[tuple[Trajectory, list[int]]]]

WAYS: dict[str, Way] = {
    "tool's reply": lambda family, text: _calling(family, LookTool(text)),
    "tool's reply that is cut": lambda family, text: _calling(family, LookTool(text * 4), max_observation_tokens=90),
    "tool's description": lambda family, text: _calling(family, LookTool(described=text, parameter=text)),
    "passage": _searching,
    "passage that is cut": lambda family, text: _searching(family, text * 4, max_observation_tokens=40),
    "column of the row": lambda family, text: played(family, Noting, columns={"note": text}),
    "observation between an environment's words": _between_own_words,
    "user's prompt": lambda family, text: _prompted(family, {"role": "user", "content": text}),
    "user's prompt in parts": _in_parts,
    "earlier call in a prompt": _with_earlier_call,
}
