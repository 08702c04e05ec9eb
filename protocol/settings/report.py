"""Settings of what a run shows and records for people."""

from pydantic import Field

from protocol.settings.section import Count, Section


class ReportSettings(Section):
    wandb_project: str | None = Field(None, description="Weights & Biases project; WANDB_MODE=offline works.")
    samples_per_step: Count = Field(1, description="Trajectories per step kept readable for report.html.")
