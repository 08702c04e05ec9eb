"""The policy calls tools until it writes a turn without a call, which is its answer.

The model's chat template describes the tools and carries their results. A call that the policy got wrong is answered
with the mistake, as a result: the policy may try again. A tool that is down fails the sample, and nothing is trained.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from protocol.errors import SettingsError
from protocol.settings.tools import ToolsSettings
from rollout.environments.base import Chat, Messages, ModelTool, Prompt, Resources, Step, Task, ToolRefusal, Turn
from rollout.environments.tool_use.arguments import fit_arguments
from rollout.environments.tool_use.call_formats import Call, CallReader, choose_reader, required_of


@dataclass(frozen=True)
class ToolReply:
    """Reply of a tool to a call."""

    text: str  # text that the policy reads
    reward: float | None = None  # tool's reward for the call; None: it gives none


class Toolbox(Protocol):
    """The tools of one conversation."""

    has_state: bool  # this process holds state of the conversation

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """One schema per tool, in the order of the prompt."""

    async def begin(self, task: Task) -> None:
        """Prepare the tools for a conversation."""

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Call the tool of this name. arguments: as the policy wrote them. Raises: ToolRefusal for a wrong call."""

    async def close(self) -> None:
        """Release the tools. Called once, also after a failed `begin`."""


class SharedTools:
    """Tools without state: one object of each serves all conversations."""

    has_state = False

    def __init__(self, tools: Sequence[ModelTool]) -> None:
        self._tools = {tool.schema["function"]["name"]: tool for tool in tools}

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def begin(self, task: Task) -> None:
        pass

    async def answer(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        tool = self._tools[name]
        return ToolReply(await tool.answer(fit_arguments(arguments, tool.schema)))

    async def close(self) -> None:
        pass


@dataclass
class MakeToolUse:
    """Makes the environment for each sample of a run, in the place of an environment's class."""

    settings: ToolsSettings
    make_toolbox: Callable[[Resources], Toolbox]  # makes the tools of one conversation
    requires: tuple[str, ...] = ()  # names of tools in the settings
    stop: tuple[str, ...] = ()
    offers_mcp: bool = False  # the tools of tools.mcp are offered too
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # rollout.chat_template_kwargs
    _reader: CallReader | None = None  # made with the first tokenizer

    def __call__(self, resources: Resources) -> "ToolUse":
        reader = self.check_model(resources.tokenizer, resources.end_tokens)
        return ToolUse(resources.max_turns, self.make_toolbox(resources), reader, self.settings.max_calls_per_turn)

    def check_model(self, tokenizer: Any, ends: Collection[int] = ()) -> CallReader:
        """Return the reader of the model's calls. ends: as of `choose_reader`.

        Raises: SettingsError for a model whose calls cannot be read.
        """
        if self._reader is None:
            self._reader = choose_reader(self.settings.call_format, tokenizer, self.template_kwargs, ends)
        return self._reader

    def check_names(self, resources: Resources) -> None:
        """Raise SettingsError for a tool whose names make its calls unreadable. resources: with all tools."""
        reader = self.check_model(resources.tokenizer, resources.end_tokens)
        for schema in self.make_toolbox(resources).schemas:
            if (problem := reader.problem_of_tool(schema["function"]["name"], required_of(schema))) is not None:
                raise SettingsError(f"settings: tools: {problem}, or do not offer it.")


def make_tool_use(settings: ToolsSettings) -> MakeToolUse:
    """Return the environment `tools`: tools.names, then tools.http, then the tools of MCP servers."""
    names = (*settings.names, *(tool.name for tool in settings.http))

    def shared_tools(resources: Resources) -> Toolbox:
        offered = [*names, *(name for name in resources.tools if name not in names)]
        return SharedTools([cast(ModelTool, resources.tool(name)) for name in offered])

    return MakeToolUse(settings, shared_tools, names, offers_mcp=True)


class ToolUse:
    """One conversation. Up to max_turns turns may call tools; calls of the one last turn after them are not run."""

    stop: tuple[str, ...] = ()

    def __init__(self, max_turns: int, toolbox: Toolbox, reader: CallReader, max_calls: int) -> None:
        """max_calls: tools.max_calls_per_turn."""
        self._reader = reader
        self._toolbox = toolbox
        self._max_turns = max_turns
        self._max_calls = max_calls
        self._num_turns = 0
        self._num_calls = 0

    async def reset(self, task: Task) -> Prompt:
        """Return the row's messages with the tools. A text becomes one user message."""
        await self._toolbox.begin(task)
        prompt = task.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Chat(messages, list(self._toolbox.schemas))

    def snapshot(self) -> dict[str, int] | None:
        return None if self._toolbox.has_state else {"turns": self._num_turns, "calls": self._num_calls}

    async def resume(self, snapshot: dict[str, int]) -> None:
        self._num_turns, self._num_calls = snapshot["turns"], snapshot["calls"]

    async def step(self, turn: Turn) -> Step:
        """Return the results of the turn's calls, or the end: no call, a turn that was cut, or no turns left."""
        self._num_turns += 1
        _, calls = await self._reader.read_async(turn.text)
        if not calls:
            return Step(is_done=True, finish=None if turn.finish == "length" else "answer")
        if turn.finish == "length":
            return Step(is_done=True)
        if self._num_turns > self._max_turns:
            return Step(is_done=True, finish="turns")
        reward: float | None = None
        results: Messages = []
        for place, call in enumerate(calls):
            reply = await self._run_call(call, is_over_limit=place >= self._max_calls)
            results.append(self._message(call, reply.text))
            if reply.reward is not None:
                reward = (reward or 0.0) + reply.reward
        return Step(results, reward=reward)

    async def close(self) -> None:
        """Release the tools."""
        await self._toolbox.close()

    async def _run_call(self, call: Call, *, is_over_limit: bool) -> ToolReply:
        try:
            if is_over_limit:
                raise ToolRefusal(f"more than {self._max_calls} calls in one turn: this one was not run")
            if call.problem is not None:
                raise ToolRefusal(f"the call cannot be read: {call.problem}")
            names = [schema["function"]["name"] for schema in self._toolbox.schemas]
            if call.name not in names:
                raise ToolRefusal(f"there is no tool {call.name[:100]}. There are: {', '.join(names)}")
            return await self._toolbox.answer(call.name, call.arguments)
        except ToolRefusal as refusal:
            # Whole, as an answer is: the last line of a traceback says what is wrong.
            return ToolReply(f"Error: {refusal}".encode(errors="replace").decode())

    def _message(self, call: Call, text: str) -> dict[str, Any]:
        # Some templates ask for a name, Mistral's for an id of 9 characters.
        message = {"role": "tool", "name": call.name, "tool_call_id": call.id or f"call{self._num_calls:05d}"[-9:]}
        self._num_calls += 1
        return {**message, "content": text}
