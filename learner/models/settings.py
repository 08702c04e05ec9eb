"""Settings of a trained model: its folder, type, optimizer and parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from learner.disk.model_folder import read_max_positions
from learner.models.weights.lora import LoraForm
from protocol.settings.settings import Settings
from protocol.settings.zero_stage import Offload, critic_zero


@dataclass(frozen=True)
class PolicySettings:
    """One policy model, its optimizer and its learning rate."""

    model_dir: Path  # local folder in Hugging Face form
    dtype: Literal["float32", "bfloat16"]  # type of forward and backward passes; master weights and moments are float32
    zero_stage: Literal[0, 1, 2, 3]  # stage in the settings; `zero_stage_of` returns the one that runs
    lr: float  # peak learning rate
    betas: tuple[float, float]  # decay rates of AdamW's first and second moment
    weight_decay: float  # decay of AdamW, before it is multiplied by the learning rate
    max_grad_norm: float  # largest global gradient norm; larger gradients are scaled down
    warmup_steps: int  # updates over which the learning rate rises to lr; 0: none
    total_steps: int  # update at which the learning rate reaches lr * min_lr_ratio and stays there
    min_lr_ratio: float  # last learning rate over lr
    schedule: Literal["constant", "linear", "cosine"]  # shape of the learning rate after the warm-up
    seed: int  # seed of torch on every rank
    is_trained: bool = True  # False: the model is scored and pushed, and has no optimizer
    role: Literal["policy", "critic", "reference"] = "policy"
    max_tokens: int = 4096  # longest generated trajectory
    longest_text: int = 4096  # longest trajectory or row, which decides the factors of LongRoPE
    micro_batch_tokens: int = 8192  # token budget of a micro-batch; 1: one trajectory each
    are_pairs: bool = False  # both answers of a pair are in one micro-batch, whatever its budget
    share_prompts: bool = False  # trajectories of a micro-batch compute an equal prompt once
    updates_per_step: int = 1  # updates of one step of the run: a resume with another number keeps the schedule's place
    temperature: float = 1.0  # logprobs are those of the sampled distribution
    offload: Offload = "none"  # parts in host memory; all: weights too
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # settings merged into DeepSpeed's configuration
    gradient_checkpointing: bool = False  # activations are recomputed in the backward pass, which saves memory
    lora: LoraForm | None = None  # adapters, the only trained parameters; None: the whole model is trained
    router_aux_loss: float = 0.0  # weight of the model's own loss that balances its experts
    trust_remote_code: bool = False  # code in the model folder may run


def critic_settings(settings: Settings, model: Path) -> PolicySettings:
    """Return the critic's settings: the policy's, except those of the `critic` section. The whole model is trained."""
    critic, policy = settings.critic, policy_settings(settings, model)
    zero_stage, offload = critic_zero(settings)
    return replace(
        policy,
        role="critic",
        lr=critic.lr,
        warmup_steps=critic.lr_warmup_steps * updates_per_step(settings),
        total_steps=updates_per_step(settings) * settings.run.max_steps,
        zero_stage=zero_stage,
        offload=offload,
        deepspeed={},
        lora=None,
        router_aux_loss=0.0,
    )


def reference_settings(settings: Settings, model: Path) -> PolicySettings:
    """Return the reference's settings: the policy's, without training."""
    return replace(policy_settings(settings, model), role="reference", gradient_checkpointing=False)


def updates_per_step(settings: Settings) -> int:
    return settings.learner.num_mini_batches * settings.learner.num_epochs


def policy_settings(settings: Settings, model: Path) -> PolicySettings:
    """Return the policy's settings for reinforcement learning."""
    learner, longest = settings.learner, settings.rollout.max_context_tokens
    lora = settings.policy.lora
    return PolicySettings(
        model_dir=model,
        dtype=settings.policy.dtype,
        zero_stage=learner.zero_stage,
        lr=learner.lr,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        warmup_steps=updates_per_step(settings)
        * (learner.lr_warmup_steps or round(learner.lr_warmup_ratio * settings.run.max_steps)),
        # The critic's warm-up has no updates of the policy.
        total_steps=updates_per_step(settings) * max(0, settings.run.max_steps - settings.critic.warmup_steps),
        updates_per_step=updates_per_step(settings),
        min_lr_ratio=learner.min_lr_ratio,
        schedule=learner.lr_schedule,
        offload=learner.offload,
        deepspeed=learner.deepspeed,
        gradient_checkpointing=learner.gradient_checkpointing,
        lora=LoraForm(lora.rank, lora.alpha or float(lora.rank), lora.targets) if lora.rank else None,
        router_aux_loss=learner.router_aux_loss,
        seed=settings.run.seed,
        max_tokens=longest,
        longest_text=(read_max_positions(model) or longest) if settings.is_of_rows else longest,
        micro_batch_tokens=learner.micro_batch_tokens,
        are_pairs=settings.objective in ("dpo", "reward_model"),
        share_prompts=learner.share_prompts,
        temperature=settings.rollout.temperature,
        trust_remote_code=settings.policy.trust_remote_code,
    )
