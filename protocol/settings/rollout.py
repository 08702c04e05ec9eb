"""Settings of the rollout servers: engines, episodes, budgets and time limits."""

from typing import Any

from pydantic import (
    Field,
    PositiveFloat,
)

from protocol.settings.section import CountAboveZero, Seconds, Section

BUNDLED_ENVIRONMENTS = ("single_turn", "search")


class RolloutSettings(Section):
    num_servers: CountAboveZero = Field(1, description="vLLM servers.")
    tensor_parallel_size: CountAboveZero = Field(1, description="GPUs of one server.")
    group_size: CountAboveZero = Field(8, le=4096, description="Samples of one prompt.")
    environment: str = Field("single_turn", description="single_turn, search, module:Class or FILE.py:Class.")
    max_turns: CountAboveZero = Field(4, description="Turns in which the policy may search before its last generation.")
    max_response_tokens: CountAboveZero = Field(500, description="Tokens the policy may write in one turn.")
    max_observation_tokens: CountAboveZero = Field(
        500, description="Tokens of one reply of the environment; longer ones are cut."
    )
    max_context_tokens: CountAboveZero = Field(
        4096, le=1 << 24, description="Tokens of a whole trajectory, prompt included."
    )
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    max_groups_in_flight: CountAboveZero = Field(64, le=4096, description="Groups that one server works on at a time.")
    turn_timeout_s: Seconds = Field(600.0, description="Longest wait for one generation.")
    lease_timeout_s: Seconds = Field(1800.0, description="Longest life of a lease before its prompt goes out again.")
    start_timeout_s: Seconds = Field(600.0, description="Longest wait for the servers to start.")
    engine_args: dict[str, Any] = Field({}, description="Passed to vLLM's AsyncEngineArgs unchanged.")
