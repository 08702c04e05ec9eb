"""Settings of the run as a whole: its name, folder, seed, length and resumption."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from protocol.settings.section import Count, Seconds, Section

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,179}")


def _checked_name(name: str) -> str:
    """Raise ValueError for a name that cannot be a folder's or a message's; `-2` may come behind it."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            "expected at most 180 of A-Z a-z 0-9 . _ -, of which the first is a letter or digit; a folder is run.dir's"
        )
    return name


RunName = Annotated[str, AfterValidator(_checked_name)]


class RunSettings(Section):
    name: RunName = Field("run", description="Folder name of the run under run.dir.")
    dir: str = Field("runs", min_length=1, description="Folder that holds the runs.")
    seed: Count = Field(1, description="Seeds the order of prompts, sampling and initialisation.")
    max_steps: Count = Field(100, description="Optimizer steps after which the run ends by itself.")
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: this run's newest valid checkpoint; never: refuse a used folder; or a checkpoint's path.",
    )
    max_restarts: Count = Field(
        3, description="Restarts after a death without a step that was not reached before; 0: the run ends."
    )
    drain_s: Seconds = Field(
        20.0, description="Longest time from Ctrl-C or SIGTERM until the last checkpoint is written."
    )
