"""Settings of the learner: ranks, steps, staleness, optimizer, algorithm, checkpoints."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
)
from pydantic.types import NonNegativeFloat, NonNegativeInt

from protocol.settings.section import Fraction, Section, ZeroStage


class LearnerSettings(Section):
    num_ranks: PositiveInt = Field(1, description="DeepSpeed ranks.")
    zero_stage: ZeroStage = Field(0, description="DeepSpeed ZeRO stage.")
    groups_per_step: PositiveInt = Field(32, description="Prompts whose groups make one optimizer step.")
    max_staleness: NonNegativeInt = Field(
        1, description="Optimizer steps a trained token may lag behind; 0 is synchronous."
    )
    stale_policy: Literal["wait", "drop"] = Field("wait", description="What happens to a group about to grow too old.")
    equal_groups: Literal["keep", "skip"] = Field(
        "keep", description="skip: groups whose rewards are all equal take no part in the loss."
    )
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    lr_warmup_steps: NonNegativeInt = Field(0, description="Steps of linear warm-up.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Decay after the warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW weight decay.")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm.")
    micro_batch_tokens: PositiveInt = Field(
        8192, description="Token budget of one forward and backward pass on one rank."
    )
    gradient_checkpointing: bool = Field(False, description="Trade compute for memory in the backward pass.")
    recipe: Literal["grpo", "dr_grpo", "rloo"] = Field(
        "grpo", description="Names an advantage, loss and correction that belong together."
    )
    advantage: Literal["grpo", "dr_grpo", "rloo"] | None = Field(None, description="null: the recipe's.")
    loss: Literal["ppo", "reinforce"] | None = Field(None, description="null: the recipe's.")
    correction: Literal["none", "tis", "icepop"] | None = Field(None, description="null: the recipe's.")
    clip_low: PositiveFloat = Field(0.2, description="Ratio is clipped below 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.2, description="Ratio is clipped above 1 + clip_high.")
    checkpoint_every_steps: NonNegativeInt = Field(50, description="Steps between checkpoints; 0: only the last one.")
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(2, description="Valid checkpoints kept on disk.")
    num_threads: NonNegativeInt = Field(
        0, description="CPU threads of one rank; 0: its share of the cores, less one for each rollout server."
    )
    batch_timeout_s: PositiveFloat = Field(1800.0, description="Longest wait of a rank for its next batch.")
    deepspeed: dict[str, Any] = Field({}, description="Merged into DeepSpeed's own configuration.")
