"""The policy calls tools until it writes a turn without a call, which is its answer.

The model's own chat template tells it of the tools and carries their results; how a call is written follows from the
template too. A call that the policy got wrong is answered with what is wrong, as a result: it may try again. A tool
that is down fails the sample instead, and nothing is trained.
"""

from typing import Any

from protocol.errors import SettingsError
from protocol.one_line import one_line
from rollout.environments.base import Chat, Messages, Prompt, Resources, Step, Task, ToolRefusal, Turn
from rollout.environments.tool_use.arguments import fitted
from rollout.environments.tool_use.call_formats import CALL_FORMATS, Call, format_of_template
from rollout.environments.tool_use.toolbox import Toolbox


class ToolUse:
    """One conversation. Up to max_turns turns may call tools; calls of the one last turn after them are not run."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources, toolbox: Toolbox, call_format: str, max_calls: int) -> None:
        """call_format: tools.call_format. max_calls: tools.max_calls_per_turn.

        Raises: SettingsError when the model's chat template does not say how it writes calls.
        """
        self._calls_in = CALL_FORMATS[chosen_format(call_format, resources.chat_template)]
        self._toolbox = toolbox
        self._max_turns = resources.max_turns
        self._max_calls = max_calls
        self._num_turns = 0
        self._num_calls = 0

    async def reset(self, task: Task) -> Prompt:
        """Return the row's messages, of which the model is told with the tools; a text is its user's only message."""
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
        calls = self._calls_in(turn.text)
        if not calls:
            return Step(is_done=True, finish=None if turn.finish == "length" else "answer")
        if turn.finish == "length":
            return Step(is_done=True)
        if self._num_turns > self._max_turns:
            return Step(is_done=True, finish="turns")
        reward: float | None = None
        results: Messages = []
        for place, call in enumerate(calls):
            text, given = await self._result(call, is_over=place >= self._max_calls)
            results.append(self._message(call, text))
            if given is not None:
                reward = (reward or 0.0) + given
        return Step(results, reward=reward)

    async def close(self) -> None:
        """Give the tools back."""
        await self._toolbox.close()

    async def _result(self, call: Call, *, is_over: bool) -> tuple[str, float | None]:
        """Return what the policy reads of a call, and the tool's reward for it."""
        try:
            if is_over:
                raise ToolRefusal(f"more than {self._max_calls} calls in one turn: this one was not run")
            if call.problem is not None:
                raise ToolRefusal(f"the call cannot be read: {call.problem}")
            schemas = {schema["function"]["name"]: schema for schema in self._toolbox.schemas}
            if call.name not in schemas:
                raise ToolRefusal(f"there is no tool {call.name[:100]}. There are: {', '.join(schemas)}")
            answered = await self._toolbox.answer(call.name, fitted(call.arguments, schemas[call.name]))
        except ToolRefusal as refusal:
            return f"Error: {one_line(refusal)}", None
        return answered.text, answered.reward

    def _message(self, call: Call, text: str) -> dict[str, Any]:
        # Some templates ask for a name, Mistral's for an id of 9 characters.
        message = {"role": "tool", "name": call.name, "tool_call_id": f"call{self._num_calls:05d}"[-9:]}
        self._num_calls += 1
        return {**message, "content": text}


def chosen_format(wanted: str, template: Any) -> str:
    """Return the name of the format in which calls are read.

    wanted: tools.call_format. template: the model's chat template, or several by name; None: it has none.
    Raises: SettingsError with what to change.
    """
    if template is None:
        raise SettingsError(
            "settings: policy.model has no chat template, and only by one can a model be told of tools. Use a model "
            "that has one, or rollout.environment = single_turn."
        )
    if wanted != "auto":
        return wanted
    found = format_of_template(str(template))
    if found is None:
        raise SettingsError(
            f"settings: tools.call_format = auto, but the chat template of policy.model writes calls in no known way. "
            f"Set it to one of {', '.join(CALL_FORMATS)}."
        )
    return found
