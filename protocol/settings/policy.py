"""Settings of the model under training and of its warm start."""

from typing import Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
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


class LoraSettings(Section):
    """Small adapters that are trained in place of the model (LoRA); pushes and model folders have them merged in."""

    rank: Count = Field(0, description="Rank of the adapters; 0: none, the whole model is trained.")
    alpha: PositiveFloat | None = Field(
        None, description="The adapters' product is multiplied by alpha / rank; null: alpha is the rank."
    )
    targets: tuple[str, ...] = Field(
        (),
        description="Last parts of adapted layers' names, such as q_proj; none: every linear layer but the head.",
    )
    push: Literal["merged", "adapters"] = Field(
        "merged", description="What servers get: weights with the adapters merged in, or adapters alone (refused)."
    )
    quantize: Literal["none", "4bit"] = Field(
        "none", description="Type of the frozen weights: the policy's, or 4 bits (refused)."
    )

    @field_validator("push")
    @classmethod
    def _refuse_adapters_alone(cls, value: str) -> str:
        if value == "adapters":
            raise ValueError(
                "an engine would compute base and adapters apart, which rounds otherwise than the merged weights that "
                "checkpoints hold. Use merged."
            )
        return value

    @field_validator("quantize")
    @classmethod
    def _refuse_4bit(cls, value: str) -> str:
        if value == "4bit":
            raise ValueError(
                "QLoRA keeps the base in 4 bits with bitsandbytes, which is not among this project's packages: its "
                "merged weights would not be those that the engine serves. Use none, learner.zero_stage 3 and "
                "learner.offload to save memory."
            )
        return value


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
    lora: LoraSettings = Field(LoraSettings(), description="Adapters that are trained in place of the model.")

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora.rank and self.warm_start.data is not None:
            raise ValueError(
                "policy.lora.rank and policy.warm_start.data are both set: a checkpoint of adapters belongs to the "
                "model they were begun on, which the warm start makes anew. Warm-start first (run.max_steps 0, no "
                "adapters), then set policy.model to the model folder of its checkpoint."
            )
        return self
