"""Settings of the models: the policy, its warm start and adapters; the critic; the reference."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from protocol.settings.paths import FilePath, ModelPath
from protocol.settings.section import Count, CountAboveZero, Fraction, Section, ZeroStage


class WarmStartSettings(Section):
    """Supervised fine-tuning of the policy before the first step, cached by the content of model, data and settings."""

    data: FilePath | None = Field(
        None, description="JSONL or Parquet of demonstrations, in a form of docs/do/fine_tune.md; null: no warm start."
    )
    max_steps: CountAboveZero = Field(1000, description="Optimizer steps; rows are read in file order.")
    rows_per_step: CountAboveZero = Field(64, description="Rows in one step.")
    lr: PositiveFloat = Field(2e-3, description="Peak learning rate.")
    lr_warmup_steps: Count = Field(50, description="Steps of linear warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak (linear decay).")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.98), description="AdamW betas.")


class LoraSettings(Section):
    """LoRA adapters, trained instead of the model. Pushes and exported models contain them merged into the weights."""

    rank: Count = Field(0, description="Rank of the adapters; 0: the whole model is trained.")
    alpha: PositiveFloat | None = Field(
        None, description="The adapters' product is multiplied by alpha / rank; null: alpha is the rank."
    )
    targets: tuple[str, ...] = Field(
        (),
        description="Last parts of adapted layers' names, such as q_proj; empty: every linear layer but the head.",
    )


class PolicySection(Section):
    model: ModelPath = Field("", description="Model folder or Hugging Face name of the policy.")
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
    lora: LoraSettings = Field(LoraSettings(), description="Adapters that are trained instead of the model.")

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora.rank and self.warm_start.data is not None:
            raise ValueError(
                "policy.lora.rank and policy.warm_start.data are both set: a checkpoint of adapters needs its base "
                "model, which the warm start would replace. Warm-start first (run.max_steps 0, no adapters), then set "
                "policy.model to the model folder of its checkpoint."
            )
        return self


class CriticSettings(Section):
    """The model of a state's value, for learner.advantage = gae. It runs on the learner's ranks."""

    model: ModelPath = Field(
        "", description="Folder or name of a reward model or policy to start from; empty: the policy's own."
    )
    lr: PositiveFloat = Field(9e-6, description="Peak learning rate; its schedule has the policy's form.")
    lr_warmup_steps: Count = Field(0, description="Steps of linear warm-up of its learning rate.")
    warmup_steps: Count = Field(0, description="Steps at the run's beginning that train only the critic.")
    value_clip: PositiveFloat = Field(
        0.5, description="Largest change of a value, from before the step, that still lowers the critic's loss."
    )
    zero_stage: ZeroStage | None = Field(None, description="DeepSpeed ZeRO stage; null: learner.zero_stage.")
    offload: bool = Field(False, description="Keep its optimizer state in host memory; needs ZeRO stage 2 or 3.")

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload and self.zero_stage == 0:
            raise ValueError(
                "critic.offload = true needs critic.zero_stage 2 or 3: at 0 every rank holds the whole optimizer."
            )
        return self


class ReferenceSettings(Section):
    """The model that the KL compares the policy with, for kl.coefficient above 0. It runs on the learner's ranks."""

    model: ModelPath = Field(
        "", description="Folder or name of another model with the same tokenizer; empty: the policy at the run's start."
    )
    offload: bool = Field(False, description="Keep it in host memory while it is not used.")
    refresh_every_steps: Count = Field(
        0, description="Steps between copies of the current policy into it; 0: it stays as it is."
    )
