"""Settings of the model under training and of its warm start."""

from typing import Literal

from pydantic import (
    Field,
    PositiveFloat,
)

from protocol.settings.section import Count, CountAboveZero, Fraction, Section


class WarmStartSettings(Section):
    """Supervised fine-tuning of the policy before the first step, cached by the content of model, data and settings."""

    data: str | None = Field(
        None, description="JSONL of messages, prompt + response, or weighted segments; null: no warm start."
    )
    max_steps: CountAboveZero = Field(1000, description="Optimizer steps; rows are taken in file order.")
    rows_per_step: CountAboveZero = Field(64, description="Rows in one step.")
    lr: PositiveFloat = Field(2e-3, description="Peak learning rate.")
    lr_warmup_steps: Count = Field(50, description="Steps of linear warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak (linear decay).")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.98), description="AdamW betas.")


class PolicySection(Section):
    model: str = Field("", description="Model folder or Hugging Face name of the policy.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type of the weights in learner and engine.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless you trust it."
    )
    old_logprobs: Literal["behaviour", "recompute"] = Field(
        "behaviour",
        description="Old logprobs of the clipped ratio: the engine's, or the learner's before its step.",
    )
    warm_start: WarmStartSettings = Field(
        WarmStartSettings(), description="Supervised fine-tuning before the first step."
    )
