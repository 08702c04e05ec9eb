"""A user's environment, called so that whatever it does is at most the failure of its own sample.

It may raise anything, return anything, catch its own cancellation or never end: each comes out as
NeighbourError("environment") with the reason, and its place in the user's code where there is one. Failures of
neighbours that it asked (a search) pass as they are.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from protocol.contained_tasks import contain_tasks
from protocol.errors import NeighbourError
from protocol.one_line import described, one_line
from rollout.environments.base import (
    Chat,
    Environment,
    Finish,
    MakeEnvironment,
    Messages,
    Observation,
    Prompt,
    Resources,
    Step,
    Task,
    Turn,
)
from rollout.environments.snapshots import is_resumable, snapshot_text

ENVIRONMENT = "environment"
# Tokenising stops everything else on this server: a megabyte takes about half a second.
_MAX_CHARACTERS = 1 << 20
_MAX_MESSAGES = 1024
_FINISHES = get_args(Finish)
_LEAVE_S = 0.5
_CLOSE_S = 10.0
_MAX_LOGS, _MAX_LOG_NAME = 32, 100
_Checked = TypeVar("_Checked")
# Calls that were given up and would not end: kept here, or the event loop drops them in the middle.
_abandoned: set["asyncio.Task[Any]"] = set()


class GuardedEnvironment:
    """One sample's environment. Every method raises NeighbourError and nothing else.

    stop: strings that end a turn.
    """

    def __init__(self, make: MakeEnvironment, resources: Resources, turn_timeout_s: float) -> None:
        self._turn_timeout_s = turn_timeout_s
        try:
            self._environment: Environment = make(resources)
            self.stop = _checked_stop(self._environment.stop)
        except NeighbourError:
            raise
        except BaseException as error:  # a user's code may raise anything
            raise NeighbourError(ENVIRONMENT, described(error)) from error

    async def reset(self, task: Task) -> Prompt:
        """Return what the policy reads first: text, or chat messages with a role each."""
        return _checked(_checked_prompt, await self._ended(lambda: self._environment.reset(task), "no prompt"))

    async def step(self, turn: Turn) -> Step:
        """Return the environment's answer: its observation no plain string, its reward a finite float or None."""
        return _checked(_checked_step, await self._ended(lambda: self._environment.step(turn), "no observation"))

    @property
    def can_resume(self) -> bool:
        """Whether the environment can go on where another object of its class stopped."""
        return is_resumable(type(self._environment))

    def snapshot(self) -> str | None:
        """Return as JSON what another object of the class goes on from; None where none can."""
        if not self.can_resume:
            return None
        environment: Any = self._environment
        return _checked(snapshot_text, _called(environment.snapshot))

    async def resume(self, snapshot: str) -> None:
        """Have a new environment, after its reset, go on from a snapshot."""
        environment: Any = self._environment
        await self._ended(lambda: environment.resume(json.loads(snapshot)), "not gone on")

    async def close(self) -> None:
        """Have the environment give back what it holds, if it has a `close`; what that raises fails nothing."""
        environment: Any = self._environment
        if hasattr(type(environment), "close"):
            with suppress(NeighbourError):
                await self._ended(lambda: environment.close(), "not closed", _CLOSE_S)

    async def _ended(self, call: Callable[[], Awaitable[Any]], complaint: str, timeout_s: float | None = None) -> Any:
        """Return what a call gives within turn_timeout_s; in a task of its own, it cannot keep ours from ending."""
        task = asyncio.create_task(_outcome_of(call))
        try:
            done, _ = await asyncio.wait([task], timeout=timeout_s or self._turn_timeout_s)
        except asyncio.CancelledError:
            _abandon(task)
            # One that lets itself be cancelled has left its services before the session's end closes them.
            await asyncio.wait([task], timeout=_LEAVE_S)
            raise
        if not done:
            _abandon(task)
            limit = f"rollout.turn_timeout_s = {self._turn_timeout_s:g} s"
            raise NeighbourError(ENVIRONMENT, f"{complaint} within {limit}")
        if task.cancelled():
            raise NeighbourError(ENVIRONMENT, f"{complaint}: it cancelled itself")
        outcome = task.result()
        if isinstance(outcome.error, NeighbourError):
            raise outcome.error
        if outcome.error is not None:
            raise NeighbourError(ENVIRONMENT, described(outcome.error)) from outcome.error
        return outcome.value


@dataclass
class _Outcome:
    """How a call ended."""

    value: Any = None
    error: BaseException | None = None


async def _outcome_of(call: Callable[[], Awaitable[Any]]) -> _Outcome:
    """Return what a call gave or raised. A SystemExit that left the task would end the event loop, so none does."""
    contain_tasks()
    try:
        return _Outcome(value=await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a user's code may raise anything
        return _Outcome(error=error)


def _abandon(task: "asyncio.Task[Any]") -> None:
    """Cancel a call and go on without it, whether or not it ends."""
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    task.cancel()


def _checked(check: Callable[[Any], _Checked], value: Any) -> _Checked:
    """Return what `check` makes of an environment's value; an array's truth, a user's class may raise anything."""
    try:
        return check(value)
    except NeighbourError:
        raise
    except BaseException as error:
        raise NeighbourError(ENVIRONMENT, f"its answer cannot be read: {described(error)}") from error


def _called(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except NeighbourError:
        raise
    except BaseException as error:  # a user's code may raise anything
        raise NeighbourError(ENVIRONMENT, described(error)) from error


def _checked_stop(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, tuple | list) or not all(isinstance(text, str) and text for text in stop):
        raise _wrong("its `stop`", stop, "a tuple of strings")
    return tuple(stop)


def _checked_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return _checked_text(prompt, "reset returned a prompt")
    if isinstance(prompt, Chat):
        tools = prompt.tools
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise _wrong("reset returned the tools", tools, "a list of OpenAI's function schemas")
        return Chat(_checked_messages(prompt.messages, "reset returned"), [dict(tool) for tool in tools])
    return _checked_messages(prompt, "reset returned")


def _checked_messages(messages: Any, what: str) -> Messages:
    if not isinstance(messages, list) or not all(_is_message(turn) for turn in messages) or not messages:
        raise _wrong(what, messages, "text, or a list of chat messages with role and content")
    if len(messages) > _MAX_MESSAGES:
        raise NeighbourError(ENVIRONMENT, f"{what} {len(messages)} messages, at most {_MAX_MESSAGES}")
    for turn in messages:
        if isinstance(content := turn.get("content"), str):
            _checked_text(content, f"{what} a message")
    return [dict(turn) for turn in messages]


def _is_message(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str)


def _checked_step(step: Any) -> Step:
    if not isinstance(step, Step):
        raise _wrong("step returned", step, "a rollout.environments.base.Step")
    if step.finish is not None and step.finish not in _FINISHES:
        raise _wrong("the step's finish is", step.finish, f"None or one of {', '.join(_FINISHES)}")
    return Step(
        _checked_observation(step.observation),
        bool(step.is_done),
        _checked_number(step.reward, "reward"),
        step.finish,
        _checked_number(step.score, "score"),
        _checked_logs(step.logs),
    )


def _checked_logs(logs: Any) -> dict[str, float]:
    """Return those numbers that a curve can show; one that it cannot show fails nothing."""
    if not isinstance(logs, Mapping):
        raise _wrong("the step's logs are", logs, "numbers by name")
    shown: dict[str, float] = {}
    for name, value in list(logs.items())[:_MAX_LOGS]:
        with suppress(NeighbourError):
            plain = one_line(name, _MAX_LOG_NAME)
            if (number := _checked_number(value, "log")) is not None and plain:
                shown[plain] = number
    return shown


def _checked_observation(observation: Any) -> Observation | Messages | None:
    if isinstance(observation, str):
        observation = Observation(observation)
    if observation is None:
        return None
    if isinstance(observation, list):
        return _checked_messages(observation, "the step's observation is")
    if not isinstance(observation, Observation):
        raise _wrong("the step's observation is", observation, "text, an Observation, chat messages or None")
    for name in ("head", "body", "tail"):
        _checked_text(getattr(observation, name), f"the observation's {name}")
    return observation


def _checked_text(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise _wrong(f"{what} is", text, "text")
    if len(text) > _MAX_CHARACTERS:
        raise NeighbourError(ENVIRONMENT, f"{what} has {len(text)} characters, at most {_MAX_CHARACTERS}")
    return text


def _checked_number(value: Any, what: str) -> float | None:
    """Return a reward or score as a float: a number, a bool, or an array or tensor of one number."""
    if value is None:
        return None
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = float(plain) if isinstance(plain, int | float) else None
    except Exception as error:  # arrays of several numbers, integers too large for a float, users' own classes
        raise NeighbourError(ENVIRONMENT, described(error)) from error
    if number is None:
        raise _wrong(f"the step's {what} is", value, "a number")
    if not math.isfinite(number):
        raise NeighbourError(ENVIRONMENT, f"gave the {what} {number}")
    return number


def _wrong(what: str, value: Any, expected: str) -> NeighbourError:
    try:
        shown = repr(value)
    except Exception:  # a user's class may have a __repr__ that fails
        shown = "?"
    shown = one_line(shown, 80)
    return NeighbourError(ENVIRONMENT, f"{what} {shown} ({type(value).__name__}), expected {expected}")
