"""Settings of the weight push."""

from typing import Literal

from pydantic import (
    Field,
    PositiveFloat,
)

from protocol.settings.section import CountAboveZero, Seconds, Section


class WeightsSettings(Section):
    backend: Literal["auto", "nccl", "ipc", "gloo"] = Field(
        "auto",
        description="auto: nccl with GPUs, gloo without; ipc: servers on the first rank's machine.",
    )
    bucket_mb: CountAboveZero | None = Field(
        None, description="Size of one bucket of weights on the wire, MiB; null: 256 between GPUs, 16 between CPUs."
    )
    deadline_s: Seconds = Field(120.0, description="Longest wait for any one state of a push.")
    second_copy: bool | None = Field(
        None,
        description="true: servers receive a push beside the weights in use and go on generating, for the memory of "
        "one more model; false: into them, standing still, with two buckets; null: true over gloo, else and on shared "
        "devices false.",
    )
    probe: bool = Field(
        True, description="After each push compare logprobs of a fixed text between learner and server."
    )
    probe_tolerance: PositiveFloat | None = Field(
        None, description="Largest accepted difference, nats; null: 0.001 in float32, 0.5 in bfloat16."
    )
