"""Settings of the learner: ranks, steps, staleness, optimizer, algorithm, checkpoints."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)
from pydantic.types import NonNegativeFloat

from protocol.settings.algorithm.names import AdvantageName, CorrectionName, LossName
from protocol.settings.section import Count, CountAboveZero, Fraction, Seconds, Section, StoreUrl, ZeroStage


class LearnerSettings(Section):
    num_ranks: CountAboveZero = Field(1, description="DeepSpeed ranks.")
    zero_stage: ZeroStage = Field(
        0, description="DeepSpeed ZeRO stage: ranks share optimizer state (1), gradients too (2), weights too (3)."
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="What ranks keep in the CPU's memory: optimizer state (ZeRO 1 to 3), weights too (ZeRO 3)."
    )
    groups_per_step: CountAboveZero = Field(32, description="Prompts whose groups make one optimizer step.")
    max_staleness: Count = Field(1, description="Optimizer steps a trained token may lag behind; 0 is synchronous.")
    stale_policy: Literal["wait", "drop"] = Field("wait", description="What happens to a group about to grow too old.")
    equal_groups: Literal["keep", "skip"] = Field(
        "keep", description="skip: groups whose rewards are all equal take no part in the loss."
    )
    num_mini_batches: CountAboveZero = Field(
        1, description="Parts of a step's groups; each makes an optimizer update of its own."
    )
    num_epochs: CountAboveZero = Field(1, description="Passes over a step's samples: all mini-batches, again in order.")
    lr: NonNegativeFloat = Field(1e-6, description="Peak learning rate; 0: nothing is learned.")
    lr_warmup_steps: Count = Field(0, description="Steps of linear warm-up.")
    lr_warmup_ratio: Fraction = Field(0.0, description="The same as a share of run.max_steps.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Decay after the warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW weight decay.")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm.")
    micro_batch_tokens: CountAboveZero = Field(
        8192, description="Token budget of one forward and backward pass on one rank."
    )
    gradient_checkpointing: bool = Field(False, description="Trade compute for memory in the backward pass.")
    router_aux_loss: NonNegativeFloat = Field(
        0.0, description="Mixture of experts: weight of the model's own loss that balances its experts; 0: none."
    )
    sequence_parallel: CountAboveZero = Field(1, description="Ranks that share one trajectory; only 1 is built.")
    float32_head: bool = Field(
        False, description="Compute the LM head's products in float32, whatever policy.dtype: closer logprobs, slower."
    )
    recipe: Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"] = Field(
        "grpo",
        description="Names settings that belong together (learner/algorithms/README.md); others override them.",
    )
    advantage: AdvantageName | None = Field(
        None,
        description="grpo, dr_grpo, rloo, reinforce_pp_baseline, opo, gae, reinforce_pp, or FILE.py:name; "
        "null: the recipe's.",
    )
    loss: LossName | None = Field(None, description="ppo, gspo, cispo, reinforce, or FILE.py:name; null: the recipe's.")
    correction: CorrectionName | None = Field(
        None, description="none, tis, icepop, geo_mask, or FILE.py:name; null: the recipe's."
    )
    gamma: Fraction = Field(1.0, description="gae, reinforce_pp: what a reward loses with each model token before it.")
    gae_lambda: Fraction = Field(1.0, description="gae: 1 trusts the rewards that came, 0 the critic's next value.")
    whiten: bool | None = Field(
        None, description="Bring the step's advantages to mean 0 and deviation 1; null: where their formula says so."
    )
    clip_low: PositiveFloat = Field(0.2, description="Ratio is clipped below 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.2, description="Ratio is clipped above 1 + clip_high.")
    dual_clip: Annotated[float, Field(ge=1.0)] | None = Field(
        3.0,
        description="ppo: the loss of a token with a negative advantage is at most this many advantages; null: free.",
    )
    correction_low: PositiveFloat | None = Field(
        None, description="Smaller weights are left out; null: icepop 0.5 (of a token), geo_mask 0.99 (of an answer)."
    )
    correction_high: Annotated[float, Field(ge=1.0)] | None = Field(
        None,
        description="tis: importance weights are cut to it; icepop, geo_mask: larger ones are left out; "
        "null: 2, of geo_mask 1.01.",
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
        1800.0, description="Longest wait of a rank for its next batch; evaluations that are awaited do not count."
    )
    rank_timeout_s: Seconds = Field(
        600.0,
        description="Longest wait of one rank for another that shows no progress: to meet, in a collective, "
        "or while rank 0 writes a checkpoint.",
    )
    deepspeed: dict[str, Any] = Field({}, description="Merged into DeepSpeed's own configuration.")

    @field_validator("sequence_parallel")
    @classmethod
    def _refuse_sequence_parallel(cls, value: int) -> int:
        if value > 1:
            raise ValueError(
                "one trajectory is computed by one rank: splitting it over ranks (DeepSpeed Ulysses) is not built. For "
                "trajectories longer than a rank's memory set learner.gradient_checkpointing to true, "
                "learner.zero_stage to 3 and learner.offload to all, or lower rollout.max_context_tokens."
            )
        return value

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
