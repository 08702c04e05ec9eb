"""Settings of the learner: ranks, steps, staleness, optimizer, algorithm, checkpoints."""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from protocol.settings.algorithm import AlgorithmSettings
from protocol.settings.section import Count, CountAboveZero, Fraction, Seconds, StoreUrl, ZeroStage


class LearnerSettings(AlgorithmSettings):
    num_ranks: CountAboveZero = Field(1, description="DeepSpeed ranks.")
    zero_stage: ZeroStage = Field(
        0, description="DeepSpeed ZeRO stage: ranks share optimizer state (1), gradients too (2), weights too (3)."
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="State in host memory: the optimizer's (ZeRO 1 to 3), weights too (ZeRO 3)."
    )
    groups_per_step: CountAboveZero = Field(32, description="Prompts whose groups make one optimizer step.")
    max_staleness: Count = Field(1, description="Optimizer steps a trained token may lag behind; 0 is synchronous.")
    stale_policy: Literal["wait", "drop"] = Field(
        "wait", description="Groups near max_staleness: wait paces leases, drop drops them."
    )
    equal_groups: Literal["keep", "skip"] = Field(
        "keep",
        description="skip: the loss excludes groups of equal rewards, also from its divisor.",
    )
    num_mini_batches: CountAboveZero = Field(1, description="Parts of a step's groups; each is one optimizer update.")
    num_epochs: CountAboveZero = Field(1, description="Passes over a step's samples, in the same order.")
    lr: NonNegativeFloat = Field(1e-6, description="Peak learning rate; 0: the weights do not change.")
    lr_warmup_steps: Count = Field(0, description="Steps of linear warm-up.")
    lr_warmup_ratio: Fraction = Field(0.0, description="Linear warm-up as a share of run.max_steps.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Decay after the warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="AdamW weight decay of all weights, also of norms and biases."
    )
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm.")
    micro_batch_tokens: CountAboveZero = Field(
        8192, description="Token budget of one forward and backward pass on one rank."
    )
    gradient_checkpointing: bool = Field(False, description="Trade compute for memory in the backward pass.")
    router_aux_loss: NonNegativeFloat = Field(
        0.0, description="Mixture of experts: weight of the model's own load-balancing loss; 0: off."
    )
    checkpoint_every_steps: Count = Field(50, description="Steps between checkpoints; 0: only the last one.")
    keep_checkpoints: CountAboveZero = Field(2, ge=2, description="Valid checkpoints kept on disk.")
    copy_checkpoints_to: StoreUrl | None = Field(
        None,
        description="URL of a folder (s3://BUCKET/FOLDER, file:///FOLDER) to which checkpoints are copied in the "
        "background, and from which a start fetches the newest; null: none.",
    )
    num_threads: Count = Field(
        0, description="CPU threads of one rank; 0: its share of the cores, less one for each rollout server."
    )
    batch_timeout_s: Seconds = Field(
        1800.0, description="Longest wait of a rank for its next batch, without the time of evaluations."
    )
    rank_timeout_s: Seconds = Field(
        600.0,
        description="Longest wait of one rank for another that shows no progress: to meet, in a collective, "
        "or while rank 0 writes a checkpoint.",
    )
    deepspeed: dict[str, Any] = Field({}, description="Merged into DeepSpeed's own configuration.")

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload != "none" and self.zero_stage == 0:
            raise ValueError(
                f"learner.offload = {self.offload} needs optimizer state that ranks share. Set learner.zero_stage to "
                f"{3 if self.offload == 'all' else '1, 2 or 3'}."
            )
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(
                f"learner.offload = all needs learner.zero_stage = 3, and it is {self.zero_stage}. Set it to 3, or "
                "learner.offload to optimizer."
            )
        return self
