"""Settings of the reference model, which the policy is held near; needed where `kl.coefficient` is above 0."""

from typing import Any

from pydantic import Field, model_validator

from protocol.settings.roles.without_ranks import refuse_own_ranks
from protocol.settings.section import Count, Section


class ReferenceSettings(Section):
    model: str = Field(
        "", description="Folder or name of another model of the same tokenizer; empty: the policy as the run begins."
    )
    offload: bool = Field(False, description="Keep it in host memory between its uses.")
    refresh_every_steps: Count = Field(
        0, description="Steps after which it becomes the policy as it is then, again and again; 0: it stays."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_own_ranks(cls, given: Any) -> Any:
        return refuse_own_ranks("reference", given)
