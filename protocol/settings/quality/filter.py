"""Settings of the filter on groups: which are trained, and which are replaced because their scores say nothing."""

from typing import Literal, Self

from pydantic import Field, model_validator

from protocol.settings.section import Count, Section


class FilterSettings(Section):
    dynamic_sampling: bool = Field(
        False,
        description="Train a group only if low < its mean score < high; the next prompts replace the others.",
    )
    low: float = Field(0.0, description="A group whose mean score is at or below this is filtered: too hard.")
    high: float = Field(1.0, description="A group whose mean score is at or above this is filtered: too easy.")
    score: str = Field(
        "reward",
        min_length=1,
        max_length=200,
        description="reward: the `scores` of reward services or an environment's score where they give one, else the "
        "reward. Or the name of one part of the reward (an endpoint's).",
    )
    max_replaced: Count = Field(
        20, description="Groups filtered before one step at most, in learner.groups_per_step; 0: no limit."
    )
    at_limit: Literal["stop", "keep"] = Field(
        "stop", description="stop: the run ends and says why; keep: the step takes what comes, filtered or not."
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"filter.low = {self.low:g} and filter.high = {self.high:g} leave no score between them. "
                "Lower the first or raise the second."
            )
        return self
