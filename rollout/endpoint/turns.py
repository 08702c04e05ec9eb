"""A request for a turn of the policy, and the turn, without the form of either API."""

import json
import string
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollout.endpoint.branches import Branch, Unit, Wording
from rollout.endpoint.messages import Message, own_turn

_DIGITS = string.digits + string.ascii_lowercase


def call_id(turn: int, place: int) -> str:
    """Return the id of a turn's call: 9 letters, as Mistral's templates need; the first 7 are the turn's.

    The fifth is no digit: an example in an agent's prompt may have ids such as call00001.
    """
    first, second, third = (turn // len(_DIGITS) ** power for power in (2, 1, 0))
    letters = f"{string.ascii_lowercase[first % 26]}{_DIGITS[second % 36]}{_DIGITS[third % 36]}"
    return f"call{letters}{place % 100:02d}"


@dataclass(frozen=True)
class TurnRequest:
    """A request for a turn, read and checked."""

    messages: list[Message]
    tools: list[dict[str, Any]]  # tools for the chat template, in the form of chat completions
    template_kwargs: dict[str, Any]  # chat_template_kwargs, in addition to rollout.chat_template_kwargs
    may_call: bool  # the turn's calls are read
    stops: tuple[str, ...]  # strings that end the turn; the reply leaves them out
    max_tokens: int | None  # most tokens of the turn; None: rollout.max_response_tokens

    @property
    def kind(self) -> Hashable:
        """What the template renders around the messages: a request continues conversations of its own kind only."""
        return json.dumps([self.tools, self.template_kwargs], sort_keys=True)

    def as_rendered(self, new_from: int, written_ids: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the messages from `new_from` on for the template: results have the names of their tools.

        written_ids: ids of calls -> as the policy wrote.
        """
        calls = [call for message in self.messages for call in message.rendered.get("tool_calls", ())]
        names = {call["id"]: call["function"]["name"] for call in calls if call["id"]}

        def with_written_id(each: dict[str, Any], key: str) -> dict[str, Any]:
            return {**each, key: written_ids[each[key]]} if each.get(key) in written_ids else each

        def with_name(each: dict[str, Any]) -> dict[str, Any]:
            return {"name": names[each["tool_call_id"]], **each} if each.get("tool_call_id") in names else each

        messages = [
            with_written_id(with_name(message.rendered), "tool_call_id") for message in self.messages[new_from:]
        ]
        return [
            {**each, "tool_calls": [with_written_id(call, "id") for call in each["tool_calls"]]}
            if "tool_calls" in each
            else each
            for each in messages
        ]

    @property
    def history(self) -> list[Unit]:
        """The history in comparable form."""
        return [message.same_as for message in self.messages]

    @property
    def wordings(self) -> list[Wording]:
        """What the comparable form leaves out of each message."""
        return [message.wording for message in self.messages]


@dataclass(frozen=True)
class AgentCall:
    """A call of a tool, which the agent runs."""

    id: str
    name: str
    arguments: Mapping[str, Any]  # values in the types of the tool's schema
    written_id: str = ""  # id that the policy wrote, which may repeat an earlier one; empty: it wrote none

    @property
    def arguments_text(self) -> str:
        """The arguments as a JSON object."""
        return json.dumps(self.arguments)

    @property
    def in_chat(self) -> dict[str, Any]:
        """The call in the form of chat completions."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments_text}}


@dataclass(frozen=True)
class TurnText:
    """A turn of the policy as the agent reads it."""

    content: str  # text without calls, without a stop string, without the token that ended it
    calls: list[AgentCall]
    finish: Literal["stop", "length", "tool_calls"]  # OpenAI's finish_reason
    stop: str  # stop string that ended the turn; "": none
    num_tokens: int  # sampled tokens

    @property
    def unit(self) -> Unit:
        """The turn in comparable form."""
        return own_turn(self.content, [(call.name, call.arguments) for call in self.calls])

    @property
    def wording(self) -> Wording:
        """What the comparable form leaves out."""
        return self.content.strip(), [call.id for call in self.calls]

    @property
    def unit_with_stop(self) -> Unit | None:
        """The turn with its stop string put back by the agent, in comparable form; None: the same."""
        return own_turn(self.content + self.stop, []) if self.stop and not self.calls else None


@dataclass(frozen=True)
class TurnReply:
    """A turn of the policy, ready to be sent."""

    id: str  # id of the answer, without a prefix
    created: int  # Unix seconds
    text: TurnText  # turn as the agent reads it
    num_prompt_tokens: int  # tokens of the conversation before the turn
    policy_version: int  # version of its last token
    branch: Branch
    number: int  # its number in the branch, from 1
