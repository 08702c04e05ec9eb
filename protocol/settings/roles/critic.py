"""Settings of the critic, which says what a trajectory is going to be worth: where `learner.advantage` needs one."""

from typing import Any, Self

from pydantic import Field, PositiveFloat, model_validator

from protocol.settings.roles.without_ranks import refuse_own_ranks
from protocol.settings.section import Count, Section, ZeroStage


class CriticSettings(Section):
    model: str = Field(
        "", description="Folder or name of a reward model or policy that it begins as; empty: as the policy begins."
    )
    lr: PositiveFloat = Field(9e-6, description="Peak learning rate; its schedule's form is the policy's.")
    lr_warmup_steps: Count = Field(0, description="Steps of linear warm-up of its learning rate.")
    warmup_steps: Count = Field(0, description="Steps at the run's beginning in which the critic alone is trained.")
    value_clip: PositiveFloat = Field(
        0.5, description="How far from its value before the step an update may move a value and still gain by it."
    )
    zero_stage: ZeroStage | None = Field(None, description="DeepSpeed ZeRO stage; null: learner.zero_stage.")
    offload: bool = Field(False, description="Keep its optimizer state in host memory; needs ZeRO stage 2 or 3.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_own_ranks(cls, given: Any) -> Any:
        return refuse_own_ranks("critic", given)

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload and self.zero_stage == 0:
            raise ValueError("offload = true needs zero_stage 2 or 3: at 0 every rank holds the whole optimizer.")
        return self
