"""Bodies of agents' requests, and what in them is refused: above all, what would draw from another distribution."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rollout.endpoint.refusals import Refused

_MAX_STOPS = 64
_Stop = Annotated[str, Field(min_length=1, max_length=200)]
_Stops = Annotated[list[_Stop], Field(max_length=_MAX_STOPS)]
# Nothing that the policy reads or writes depends on these.
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "seed",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
}  # fmt: skip
# Only these values of them are what we send back.
_SHAPES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
# What the run draws by, where it says nothing else; another value changes the probability of a token.
_DRAWN_BY: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
}


class _Asked(BaseModel):
    """What chat and completions have in common; other fields are looked at by `check_others`."""

    model_config = ConfigDict(extra="allow")

    model: str = ""  # any name: there is one model here
    stop: _Stop | _Stops | None = None  # strings that end the turn; not in the reply
    max_tokens: Annotated[int, Field(gt=0)] | None = None  # most tokens to write
    stream: bool | None = None  # true: server-sent events
    stream_options: dict[str, Any] | None = None  # include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a turn."""
        return tuple([self.stop] if isinstance(self.stop, str) else self.stop or ())

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream's last event is to tell the tokens used."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(_Asked):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]  # the conversation so far
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None  # OpenAI's newer name of max_tokens
    tools: list[dict[str, Any]] | None = None  # that the model is told of, by its chat template
    tool_choice: Any = None  # auto, or none: calls are then not looked for
    logprobs: bool | None = None  # true: the reply tells each token's


class TextBody(_Asked):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]  # a text with its control tokens, or tokens; a list holds one
    logprobs: int | bool | None = None  # 0 or true: the reply tells each token's


class SessionBody(BaseModel):
    """POST /sluice/sessions: ask for a sample to play."""

    wait_s: Annotated[float, Field(ge=0.0, le=300.0)] = 30.0  # longest wait for one


class RewardBody(BaseModel):
    """POST /sluice/sessions/ID/reward."""

    reward: FiniteFloat  # of the sample
    score: FiniteFloat | None = None  # 0 to 1, for filter.score = reward; None: the reward
    logs: Annotated[dict[str, FiniteFloat], Field(max_length=32)] = {}  # numbers for curves, by name


@dataclass(frozen=True)
class Drawn:
    """How this sample is drawn, for comparison with what its agent asks for."""

    temperature: float | None  # None: greedy, whatever the agent asks for
    other_sampling: Literal["refuse", "ignore"]  # agents.other_sampling


def check_others(body: _Asked, drawn: Drawn) -> None:
    """Refuse what the reply could not be, and what would make every importance ratio wrong."""
    given = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name, value in given.items():
        if name in _SHAPES and value not in _SHAPES[name]:
            raise Refused(400, f"{name} = {value!r:.80} is not to be had here: leave it out", name, "unsupported_value")
    if drawn.other_sampling == "ignore":
        return
    for name, value in given.items():
        if name in _SHAPES or name in _WITHOUT_EFFECT:
            continue
        if name == "temperature":
            if drawn.temperature is not None and value != drawn.temperature:
                raise _other_distribution(name, value, f"rollout.temperature = {drawn.temperature:g}")
        elif name not in _DRAWN_BY:
            raise Refused(400, f"{name} is not known here. {_ADVICE}", name, "unknown_parameter")
        elif value not in _DRAWN_BY[name]:
            raise _other_distribution(name, value, f"{name} = {_DRAWN_BY[name][0]!r}")


def check_tool_choice(choice: Any) -> bool:
    """Return whether calls of tools are looked for in a turn. Raises: Refused for what a policy is not free in."""
    if choice is None or choice == "auto":
        return True
    if choice == "none":
        return False
    what = f"tool_choice = {choice!r:.80} would force the policy's tokens, which are then not drawn from it"
    raise Refused(400, f"{what}. Use auto or none", "tool_choice", "unsupported_value")


def single_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    """Return the one prompt of a request for completions."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Refused(400, f"prompt holds {len(prompt)} prompts, expected one", "prompt")
        return prompt[0]
    if not prompt:
        raise Refused(400, "prompt is empty", "prompt")
    return prompt  # type: ignore[return-value]


_ADVICE = "Leave it out, or set agents.other_sampling = ignore"


def _other_distribution(name: str, value: Any, drawn: str) -> Refused:
    problem = f"{name} = {value!r:.80} draws from another distribution than the one that is trained ({drawn})"
    return Refused(400, f"{problem}: every ratio would be wrong. {_ADVICE}", name, "unsupported_value")
