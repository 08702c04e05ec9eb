"""Settings of the rollout servers: engines, episodes, budgets and time limits, agents."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    field_validator,
)

from protocol.settings.paths import FILE_ENVIRONMENTS, EnvironmentName
from protocol.settings.section import Count, CountAboveZero, Fraction, Seconds, Section

# vLLM's name for the logprobs of the distribution that tokens are drawn from, temperature and all.
LOGPROBS_MODE = "processed_logprobs"
# vLLM takes biases in this range.
_Bias = Annotated[float, Field(ge=-100.0, le=100.0)]

BUNDLED_ENVIRONMENTS = ("single_turn", "search", "tools", "agents")
ENVIRONMENT_FORMS = (
    ", ".join([*BUNDLED_ENVIRONMENTS, *(f"{kind}:{file}" for kind, file in FILE_ENVIRONMENTS.items()), "module:Class"])
    + " or FILE.py:Class"
)


class RolloutSettings(Section):
    num_servers: CountAboveZero = Field(1, description="vLLM servers.")
    tensor_parallel_size: CountAboveZero = Field(1, description="GPUs of one server.")
    group_size: CountAboveZero = Field(8, le=4096, description="Samples of one prompt.")
    environment: EnvironmentName = Field("single_turn", description=f"{ENVIRONMENT_FORMS}.")
    max_turns: CountAboveZero = Field(
        4, description="Turns in which the policy may search or call tools before its last."
    )
    max_response_tokens: CountAboveZero = Field(500, description="Tokens the policy may write in one turn.")
    max_observation_tokens: CountAboveZero = Field(
        500, description="Tokens of one reply of the environment; longer ones are cut."
    )
    max_context_tokens: CountAboveZero = Field(
        4096, le=1 << 24, description="Tokens of a whole trajectory, prompt included."
    )
    max_conversation_s: Seconds | None = Field(
        None,
        description="A conversation whose turns and replies took longer gets no further turn, and is scored as it is; "
        "null: no limit.",
    )
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    max_groups_in_flight: CountAboveZero = Field(64, le=4096, description="Groups that one server works on at a time.")
    turn_timeout_s: Seconds = Field(600.0, description="Longest wait for one generation.")
    lease_timeout_s: Seconds = Field(1800.0, description="Longest life of a lease before its prompt goes out again.")
    resume_turns: bool = Field(
        True,
        description="The coordinator keeps finished turns of a conversation; another server goes on from them when "
        "its own is gone. False: it begins anew.",
    )
    start_timeout_s: Seconds = Field(600.0, description="Longest wait for the servers to start.")
    engine_args: dict[str, Any] = Field({}, description="Passed to vLLM's AsyncEngineArgs unchanged.")

    @field_validator("engine_args")
    @classmethod
    def _refuse_what_training_cannot_use(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.get("enable_lora"):
            raise ValueError(
                "enable_lora = true wraps the engine's layers, and pushes would find their weights under other names. "
                "Remove it: policy.lora needs nothing of the engine, its adapters are pushed merged."
            )
        if "load_format" in value:
            raise ValueError(
                "load_format has no use: servers start with dummy weights and receive the policy's by the first push. "
                "Remove it."
            )
        if (mode := value.get("logprobs_mode", LOGPROBS_MODE)) != LOGPROBS_MODE:
            raise ValueError(
                f"logprobs_mode = {mode} has the engine tell other logprobs than those of the distribution that it "
                "draws tokens from, and training would take the one for the other. Remove it."
            )
        return value


class AgentsSettings(Section):
    """Programs of the user that generate through a server's OpenAI-compatible address."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that rollout servers listen on for agents.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="Port of a node's first rollout server; its next ones take the next free ones. 0: any free one."
    )
    idle_timeout_s: Seconds = Field(300.0, description="An agent that asks nothing for so long has failed its sample.")
    trained_conversation: Literal["last", "longest", "only"] = Field(
        "last",
        description="Of several conversations of one sample: the one answered last is trained; the one in which the "
        "policy wrote most; a second one is refused.",
    )
    other_sampling: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="What becomes of a temperature, top_p or penalty that agents ask for and the run does not.",
    )
    max_requests: CountAboveZero = Field(
        1000, le=100_000, description="Generations that one sample's agent may ask for."
    )


class SamplingSettings(Section):
    """How samples are drawn beside rollout.temperature. What changes the distribution is for evaluations alone."""

    top_p: PositiveFloat = Field(1.0, le=1.0, description="Draw from the likeliest tokens of this share; 1: from all.")
    top_k: Count = Field(0, description="Draw from so many likeliest tokens; 0: from all.")
    min_p: Fraction = Field(0.0, description="Draw from tokens of at least this share of the likeliest's probability.")
    logit_bias: dict[Count, _Bias] = Field({}, max_length=1024, description="Token id -> added to its logit.")
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        [], max_length=64, description="Strings that end a turn, beside the environment's; they stay in it."
    )
    only_eval: bool = Field(
        False, description="All of these for evaluations alone: training draws from the whole distribution."
    )

    @property
    def reshaping(self) -> dict[str, object]:
        """Return the settings by which tokens are drawn from another distribution than the policy's, as they are."""
        usual = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logit_bias": {}}
        return {name: value for name, default in usual.items() if (value := getattr(self, name)) != default}
