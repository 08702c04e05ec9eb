"""Common parts of agents' requests: fields, and the fields that are refused.

vLLM's own request type accepts some sixty fields that change the distribution of the policy's tokens. Then every
importance ratio would be wrong. So a field is accepted here only with a value that leaves the distribution unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

# Fields without effect on the policy's tokens.
_IGNORED = {
    "user", "metadata", "store", "service_tier", "seed", "include",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
}  # fmt: skip
# Fields of the reply's form, with the supported values.
_SHAPES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
# Fields of the distribution, with the values that leave it unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "reasoning": ({},),
}
_LOGPROBS = "message.output_text.logprobs"  # what a request of /v1/responses may include
_ADVICE = "Leave it out, or set agents.other_sampling = ignore"
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
                410: "session_ended_error"}  # fmt: skip


class Refusal(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """status: HTTP's. param: the wrong field. code: OpenAI's error code, if there is one."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the reply's body."""
        return error_body(self.status, str(self), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class TurnBody(BaseModel):
    """Common fields of requests for a turn."""

    model_config = ConfigDict(extra="allow")

    model: str = ""  # any name: a server has one model
    tools: list[dict[str, Any]] | None = None  # functions that the agent runs
    tool_choice: Any = None  # "none": the turn's calls stay text; all other choices: calls are read, never forced
    stream: bool | None = None  # true: server-sent events
    stream_options: dict[str, Any] | None = None  # include_usage
    chat_template_kwargs: dict[str, Any] | None = None


class SessionBody(BaseModel):
    """POST /sluice/sessions: request a sample."""

    wait_s: Annotated[float, Field(ge=0.0, le=300.0)] = 30.0  # longest wait for a sample


class RewardBody(BaseModel):
    """POST /sluice/sessions/ID/reward."""

    reward: FiniteFloat
    score: FiniteFloat | None = None  # score from 0 to 1, for filter.score = reward; None: the reward
    logs: Annotated[dict[str, FiniteFloat], Field(max_length=32)] = {}  # numbers for curves, by name


@dataclass(frozen=True)
class SessionSampling:
    """Sampling of a session's sample, which requests must not change."""

    temperature: float | None  # run's temperature; None: greedy
    other_sampling: Literal["refuse", "ignore"]  # agents.other_sampling


def check_others(body: TurnBody, sampling: SessionSampling) -> None:
    """Raise Refusal for fields that would change the reply's form or the distribution of tokens."""
    given = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, value in given.items():
        if name in _SHAPES and value not in _SHAPES[name]:
            raise Refusal(400, f"{name} = {value!r:.80} is not supported here: leave it out", name, "unsupported_value")
    if _LOGPROBS in str(given.get("include")):
        raise Refusal(400, f"{_LOGPROBS} is not supported here: leave it out", "include", "unsupported_value")
    if sampling.other_sampling == "ignore":
        return
    for name, value in given.items():
        if name in _SHAPES or name in _IGNORED:
            continue
        if name == "temperature":
            if sampling.temperature is not None and value != sampling.temperature:
                raise _other_distribution(name, value, f"rollout.temperature = {sampling.temperature:g}")
        elif name not in _NEUTRAL:
            raise Refusal(400, f"{name} is not known here. {_ADVICE}", name, "unknown_parameter")
        elif value not in _NEUTRAL[name]:
            raise _other_distribution(name, value, f"{name} = {_NEUTRAL[name][0]!r}")


def check_tool(tool: Mapping[str, Any], function: Any, path: str) -> None:
    """Raise Refusal for a tool that the service itself would run, or one in another form than this API's.

    function: the part with the name; the tool itself in /v1/responses.
    """
    if (kind := tool.get("type")) != "function":
        problem = f"{path}.type = {kind!r:.40} is not supported here: only functions of the agent are"
        raise Refusal(400, problem, f"{path}.type", "unsupported_value")
    named = function if isinstance(function, Mapping) and isinstance(function.get("name"), str) else {}
    parameters = named.get("parameters") or {}
    if not named or not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties") or {}, Mapping):
        form = "{type, name, parameters}" if function is tool else "{type, function: {name, parameters}}"
        problem = f"{path} is not {form} with parameters that are the JSON schema of an object"
        raise Refusal(400, problem, path)


def may_call(choice: Any, tools: Sequence[Any]) -> bool:
    """Return whether a turn's calls are read. A choice that would force a call leaves the policy free to write none.

    Tokens that are forced are not sampled from the policy. Raises: Refusal for another choice, such as allowed_tools.
    """
    if choice == "none" or not tools:
        return False
    if choice in (None, "auto", "required") or (isinstance(choice, dict) and choice.get("type") == "function"):
        return True
    problem = f"tool_choice = {choice!r:.80}, expected auto, none, required or a named tool"
    raise Refusal(400, f"{problem}. Send the allowed tools alone", "tool_choice", "unsupported_value")


def _other_distribution(name: str, value: Any, drawn: str) -> Refusal:
    problem = f"{name} = {value!r:.80} draws from another distribution than the one that is trained ({drawn})"
    return Refusal(400, f"{problem}: every ratio would be wrong. {_ADVICE}", name, "unsupported_value")
