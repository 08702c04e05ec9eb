"""Settings of the run as a whole: its folder, length and restarts; its weight pushes; its report."""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    model_validator,
)

from protocol.settings.paths import FilePath, ResumePath
from protocol.settings.section import Count, CountAboveZero, Seconds, Section

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,179}")


def _checked_name(name: str) -> str:
    """Raise ValueError for a name that cannot name a folder or appear in a message, also with `-2` appended."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            "expected at most 180 of A-Z a-z 0-9 . _ -, beginning with a letter or digit; run.dir holds the folder"
        )
    return name


RunName = Annotated[str, AfterValidator(_checked_name)]


class RunSettings(Section):
    name: RunName = Field("run", description="Folder name of the run under run.dir.")
    dir: FilePath = Field("runs", min_length=1, validate_default=True, description="Folder that holds the runs.")
    seed: Count = Field(
        1,
        description="Seeds the order of prompts, initialisation and, on GPUs, each sample. Timing decides which "
        "samples train together: equal runs differ.",
    )
    max_steps: Count = Field(100, description="Optimizer steps of the run.")
    max_epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        None,
        description="Passes over data.train, in place of max_steps, rounded up to whole steps; more with a filter "
        "or a curriculum that replaces prompts.",
    )
    resume: ResumePath = Field(
        "auto",
        min_length=1,
        description="auto: this run's newest valid checkpoint; never: refuse a used folder; or a checkpoint's path.",
    )
    max_restarts: Count = Field(
        3, description="Restarts in a row that reach no new step, after a crash; 0: the run ends at a crash."
    )
    drain_s: Seconds = Field(
        1500.0,
        description="Longest time from Ctrl-C or SIGTERM for the step under way and its checkpoint. If they take "
        "longer, the steps since the checkpoint before are lost.",
    )

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_epochs is not None and "max_steps" in self.model_fields_set:
            raise ValueError(
                f"run.max_steps = {self.max_steps} and run.max_epochs = {self.max_epochs:g} both set the length. "
                "Remove one; --run.max_epochs null in the command removes a settings file's."
            )
        return self


class WeightsSettings(Section):
    backend: Literal["auto", "nccl", "ipc", "gloo"] = Field(
        "auto",
        description="auto: nccl with GPUs, ipc on shared devices, gloo otherwise; ipc: memory of one machine.",
    )
    bucket_mb: CountAboveZero | None = Field(
        None, description="Size of one bucket of weights on the wire, MiB; null: 256 between GPUs, 16 between CPUs."
    )
    deadline_s: Seconds = Field(120.0, description="Longest wait for any one state of a push.")
    second_copy: bool | None = Field(
        None,
        description="true: servers generate during a push and receive it into a second copy of the model; false: they "
        "pause and receive it in place; null: true over gloo, false otherwise and on shared devices.",
    )
    probe: bool = Field(
        True, description="After each push compare logprobs of a fixed text between learner and server."
    )
    probe_tolerance: PositiveFloat | None = Field(
        None,
        description="Largest accepted median of the differences, nats; their 95th percentile may be 3 times as large. "
        "null: 0.001 in float32, 0.5 in bfloat16.",
    )


class ReportSettings(Section):
    wandb_project: str | None = Field(None, description="Weights & Biases project; WANDB_MODE=offline works.")
    tensorboard: bool = Field(
        False, description="Event files for TensorBoard in the run folder; needs the package tensorboard."
    )
    dash: bool = Field(
        False,
        description="Live page of the run on 127.0.0.1 until the command ends; its link is printed (sluice dash).",
    )
    samples_per_step: Count = Field(
        1, description="Trajectories per step in samples.jsonl, and a whole group twenty times a run; 0: none."
    )
