"""A user's environment, guarded: whatever it does is at most the failure of its own sample.

It may raise anything, return anything, swallow its own cancellation or never end. Each becomes
NeighbourError("environment") with the reason and its place in the user's code. Failures of neighbours that it called
(a search) pass unchanged.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, get_args

from protocol.contained_tasks import contain_tasks
from protocol.errors import NeighbourError
from protocol.one_line import describe_error, one_line, place_of
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

ENVIRONMENT = "environment"
# Tokenising blocks this server: a megabyte takes about half a second.
_MAX_CHARACTERS = 1 << 20
_MAX_MESSAGES = 1024
_FINISHES = get_args(Finish)
_LEAVE_S = 0.5  # time for a cancelled call to end
_CLOSE_S = 10.0
_MAX_LOGS, _MAX_LOG_NAME = 32, 100
_Value = TypeVar("_Value")
# Abandoned calls that did not end yet. Without a reference the event loop would drop them in the middle.
_abandoned: set["asyncio.Task[Any]"] = set()


class GuardedEnvironment:
    """One sample's environment. Every method raises NeighbourError and nothing else."""

    def __init__(self, make: MakeEnvironment, resources: Resources, turn_timeout_s: float) -> None:
        self._turn_timeout_s = turn_timeout_s
        self.inner: Environment = self.read(lambda: make(resources))
        self.read(lambda: _checked_stop(self.inner.stop))

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the next turn. An environment may change them between turns."""
        return self.read(lambda: _checked_stop(self.inner.stop))

    async def reset(self, task: Task) -> Prompt:
        """Return the prompt: text, or chat messages with a role each."""
        prompt = await self.call(lambda: self.inner.reset(task), "no prompt")
        return self.read(lambda: _checked_prompt(prompt), "its answer cannot be read: ")

    async def step(self, turn: Turn) -> Step:
        """Return the environment's answer. Its observation is not a plain string; its reward is finite or None."""
        step = await self.call(lambda: self.inner.step(turn), "no observation")
        return self.read(lambda: _checked_step(step), "its answer cannot be read: ")

    async def close(self) -> None:
        """Close the environment if it has a `close`. Its exceptions fail nothing."""
        environment: Any = self.inner
        if hasattr(type(environment), "close"):
            with suppress(NeighbourError):
                await self.call(lambda: environment.close(), "not closed", _CLOSE_S)

    def read(self, get: Callable[[], _Value], problem: str = "") -> _Value:
        """Return get(), which uses the user's objects: their attributes and truth values may raise anything."""
        try:
            return get()
        except NeighbourError:
            raise
        except BaseException as error:  # a user's code may raise anything
            raise NeighbourError(ENVIRONMENT, f"{problem}{describe_error(error)}", place_of(error)) from error

    async def call(self, call: Callable[[], Awaitable[Any]], complaint: str, timeout_s: float | None = None) -> Any:
        """Return the result of a coroutine, which runs in a task of its own.

        complaint: start of the error's text. timeout_s: time limit; None: turn_timeout_s.
        """
        timeout_s = timeout_s or self._turn_timeout_s
        task = asyncio.create_task(_outcome_of(call))
        try:
            done, _ = await asyncio.wait([task], timeout=timeout_s)
        except asyncio.CancelledError:
            _abandon(task)
            # A task that accepts its cancellation leaves its services before the end of the session closes them.
            await asyncio.wait([task], timeout=_LEAVE_S)
            raise
        if not done:
            _abandon(task)
            raise NeighbourError(ENVIRONMENT, f"{complaint} within rollout.turn_timeout_s = {timeout_s:g} s")
        if task.cancelled():
            raise NeighbourError(ENVIRONMENT, f"{complaint}: it cancelled itself")
        value, error = task.result()
        if isinstance(error, NeighbourError):
            raise error
        if error is not None:
            raise NeighbourError(ENVIRONMENT, describe_error(error), place_of(error)) from error
        return value


async def _outcome_of(call: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Return (value, error) of a call. A SystemExit must not leave the task: it would end the event loop."""
    contain_tasks()
    try:
        return await call(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a user's code may raise anything
        return None, error


def _abandon(task: "asyncio.Task[Any]") -> None:
    """Cancel a call without waiting for its end."""
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)
    task.cancel()


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


def _checked_messages(messages: Any, subject: str) -> Messages:
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages) or not messages:
        raise _wrong(subject, messages, "text, or a list of chat messages with role and content")
    if len(messages) > _MAX_MESSAGES:
        raise NeighbourError(ENVIRONMENT, f"{subject} {len(messages)} messages, at most {_MAX_MESSAGES}")
    for message in messages:
        if isinstance(content := message.get("content"), str):
            _checked_text(content, f"{subject} a message")
    return [dict(message) for message in messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _checked_step(step: Any) -> Step:
    if not isinstance(step, Step):
        raise _wrong("step returned", step, "a rollout.environments.base.Step")
    if step.finish is not None and step.finish not in _FINISHES:
        raise _wrong("the step's finish is", step.finish, f"None or one of {', '.join(_FINISHES)}")
    return Step(
        _checked_observation(step.observation),
        _checked_flag(step.is_done),
        _checked_number(step.reward, "reward"),
        step.finish,
        _checked_number(step.score, "score"),
        _checked_logs(step.logs),
    )


def _checked_logs(logs: Any) -> dict[str, float]:
    """Return the numbers that a curve can show. Others are left out and fail nothing."""
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


def _checked_text(text: Any, subject: str) -> str:
    if not isinstance(text, str):
        raise _wrong(f"{subject} is", text, "text")
    if len(text) > _MAX_CHARACTERS:
        raise NeighbourError(ENVIRONMENT, f"{subject} has {len(text)} characters, at most {_MAX_CHARACTERS}")
    return text


def _checked_flag(value: Any) -> bool:
    """Return is_done as a bool. A text, or a method that nobody called, is true in Python and decides nothing here."""
    plain = value.item() if hasattr(value, "item") else value
    if plain is None or isinstance(plain, int | float):
        return bool(plain)
    raise _wrong("the step's is_done is", value, "True or False")


def _checked_number(value: Any, subject: str) -> float | None:
    """Return a reward or score as a float: a number, a bool, or an array or tensor of one number."""
    if value is None:
        return None
    try:
        plain = value.item() if hasattr(value, "item") else value
        number = float(plain) if isinstance(plain, int | float) else None
    except Exception as error:  # arrays of several numbers, integers too large for a float, users' own classes
        raise NeighbourError(ENVIRONMENT, describe_error(error), place_of(error)) from error
    if number is None:
        raise _wrong(f"the step's {subject} is", value, "a number")
    if not math.isfinite(number):
        raise NeighbourError(ENVIRONMENT, f"gave the {subject} {number}")
    return number


def _wrong(subject: str, value: Any, expected: str) -> NeighbourError:
    try:
        shown = repr(value)
    except Exception:  # __repr__ of a user's class may fail
        shown = "?"
    shown = one_line(shown, 80)
    return NeighbourError(ENVIRONMENT, f"{subject} {shown} ({type(value).__name__}), expected {expected}")
