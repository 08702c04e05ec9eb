"""Settings of the rollout servers: engines, episodes, budgets and time limits, agents."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    field_validator,
)

from protocol.settings.paths import FILE_ENVIRONMENTS, EnvironmentName
from protocol.settings.section import AnyValues, Count, CountAboveZero, Fraction, Seconds, Section

# vLLM's name for logprobs of the sampled distribution, temperature included.
LOGPROBS_MODE = "processed_logprobs"
# Engine arguments that Sluice gives -> the setting that decides them.
_DECIDED = {
    "model": "policy.model",
    "dtype": "policy.dtype",
    "trust_remote_code": "policy.trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_context_tokens",
    "weight_transfer_config": "weights.backend",
}
# vLLM's range of biases.
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
    chat_template_kwargs: AnyValues = Field(
        {}, description='Variables of the model\'s chat template, such as {"enable_thinking": false}.'
    )
    max_turns: CountAboveZero = Field(
        4, description="Turns with a search or tool call, before the last turn. A class of yours must read it itself."
    )
    max_response_tokens: CountAboveZero = Field(500, description="Longest policy message of one turn, in tokens.")
    max_observation_tokens: CountAboveZero = Field(
        500, description="Longest reply of the environment, in tokens; longer replies are cut."
    )
    max_context_tokens: CountAboveZero = Field(
        4096,
        le=1 << 24,
        description="Longest trajectory, in tokens with the prompt. By default at most the model's positions.",
    )
    truncate_left: bool = Field(
        False,
        description="Cut the beginning of prompts that leave no room for max_response_tokens; false: data.overlong.",
    )
    max_conversation_s: Seconds | None = Field(
        None,
        description="Longest time of a conversation's turns and replies; then it ends and is scored; null: no limit.",
    )
    # vLLM silently draws at 0.01 where less is asked for.
    temperature: float = Field(1.0, ge=0.01, description="Sampling temperature.")
    max_groups_in_flight: CountAboveZero | None = Field(
        None,
        le=4096,
        description="Groups in flight on one server; null: as many samples as its engine decodes at a time "
        "(engine_args.max_num_seqs, or what its cache holds), and those with the environment or reward meanwhile.",
    )
    turn_timeout_s: Seconds = Field(600.0, description="Longest wait for one generation.")
    lease_timeout_s: Seconds = Field(1800.0, description="Longest life of a lease; then its group is leased again.")
    resume_turns: bool = Field(
        True,
        description="The coordinator keeps finished turns of a conversation; another server resumes from them when the "
        "first one is lost. False: the conversation restarts.",
    )
    start_timeout_s: Seconds = Field(600.0, description="Longest wait for the servers to start.")
    engine_args: AnyValues = Field({}, description="Further arguments of vLLM's AsyncEngineArgs.")

    @field_validator("engine_args")
    @classmethod
    def _refuse_unusable(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, setting in _DECIDED.items():
            if name in value:
                raise ValueError(f"{name} is what {setting} decides. Remove it, and set {setting}.")
        for name in ("seed", "worker_extension_cls"):
            if name in value:
                raise ValueError(f"{name} is given by Sluice. Remove it.")
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
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if value.get(name, 1) != 1:
                raise ValueError(
                    f"{name} = {value[name]} is not supported: a push reaches tensor-parallel workers only. Remove it, "
                    "and set rollout.tensor_parallel_size or rollout.num_servers."
                )
        for name in ("logits_processors", "generation_config", "override_generation_config"):
            if name in value:
                raise ValueError(
                    f"{name} changes what the engine samples from, and the learner does not know of it. Remove it, and "
                    "use the section `sampling`."
                )
        if (mode := value.get("logprobs_mode", LOGPROBS_MODE)) != LOGPROBS_MODE:
            raise ValueError(
                f"logprobs_mode = {mode} makes the engine return logprobs of another distribution than it samples "
                "from, and every ratio would be wrong. Remove it."
            )
        return value


class AgentsSettings(Section):
    """Programs of the user that generate through a server's OpenAI-compatible address."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that rollout servers listen on for agents.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="Port of a node's first rollout server; others take the next free ports. 0: any free port."
    )
    idle_timeout_s: Seconds = Field(300.0, description="Longest pause between an agent's requests.")
    trained_conversation: Literal["last", "longest", "only"] = Field(
        "last",
        description="Trained conversation of a sample with several. last: answered last; longest: most policy tokens; "
        "only: a second conversation is refused.",
    )
    other_sampling: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="Refuse or ignore an agent's temperature, top_p or penalty that differs from the run's.",
    )
    max_requests: CountAboveZero = Field(1000, le=100_000, description="Largest number of generations for one sample.")


class SamplingSettings(Section):
    """Sampling parameters beyond rollout.temperature. Only evaluations may change the distribution."""

    top_p: PositiveFloat = Field(1.0, le=1.0, description="Sample from the likeliest tokens of this total probability.")
    top_k: Count = Field(0, description="Sample from this number of likeliest tokens; 0: from all.")
    min_p: Fraction = Field(0.0, description="Sample from tokens with at least this share of the largest probability.")
    logit_bias: dict[Count, _Bias] = Field({}, max_length=1024, description="Token id -> added to its logit.")
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        [], max_length=64, description="Strings that end a turn, in addition to the environment's; they stay in it."
    )
    only_eval: bool = Field(
        False, description="Use these settings in evaluations only; training samples from the whole distribution."
    )

    @property
    def reshaping(self) -> dict[str, object]:
        """Return the settings that change the distribution, with their values."""
        usual = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "logit_bias": {}}
        return {name: value for name, default in usual.items() if (value := getattr(self, name)) != default}
