"""Settings of the run as a whole: its name, folder, seed, length and resumption."""

from pydantic import (
    Field,
    PositiveFloat,
)
from pydantic.types import NonNegativeInt

from protocol.settings.section import Section


class RunSettings(Section):
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Folder name of the run under run.dir."
    )
    dir: str = Field("runs", description="Folder that holds the runs.")
    seed: NonNegativeInt = Field(1, description="Seeds the order of prompts, sampling and initialisation.")
    max_steps: NonNegativeInt = Field(100, description="Optimizer steps after which the run ends by itself.")
    resume: str = Field(
        "auto",
        description="auto: this run's newest valid checkpoint; never: refuse a used folder; or a checkpoint's path.",
    )
    max_restarts: NonNegativeInt = Field(
        3, description="Restarts after a death without a step that was not reached before; 0: the run ends."
    )
    drain_s: PositiveFloat = Field(
        20.0, description="Longest time from Ctrl-C or SIGTERM until the last checkpoint is written."
    )
