"""What one optimizer step is made of: a batch from the coordinator becomes micro-batches and a loss; a result, metrics.

Shapes: P prompts (groups), G samples of each, K model tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.by_name import ADVANTAGES, CORRECTIONS, LOSSES
from learner.algorithms.losses.clipped import Clip
from learner.algorithms.ratio import log_ratio
from learner.algorithms.recipes import recipe_of
from learner.models.step_result import LossFunction, StepResult, Sums
from learner.packing.micro_batch import MicroBatch, Sample, make_micro_batch
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

# A token whose two logprobs differ by more than this is counted: the engine or the staleness has drifted.
_OUTSIDE = (0.9, 1.1)
_SUMS = ("entropy", "kl", "ratio", "ratio_squared", "clipped", "outside", "max_difference")


@dataclass(frozen=True)
class StepInputs:
    """A rank's part of a step. num_model_tokens: of all ranks. wait_s: how long the batch took to come."""

    micro_batches: tuple[MicroBatch, ...]
    loss: LossFunction
    num_model_tokens: int
    wait_s: float


def prepare_step(batch: Batch, trajectories: Mapping[int, Trajectory], settings: Settings, wait_s: float) -> StepInputs:
    """Return the step's micro-batches on this rank, with advantages from the rewards of every group of the step.

    trajectories: this rank's, by index into batch.facts.
    """
    advantages = _advantages(batch, settings)
    micro_batches = tuple(
        make_micro_batch([_sample(trajectories[index], advantages[index]) for index in part])
        for part in batch.micro_batches
    )
    num_model_tokens = sum(batch.facts[index].num_model_tokens for index in batch.planned)
    return StepInputs(micro_batches, make_loss(settings), num_model_tokens, wait_s)


def make_loss(settings: Settings) -> LossFunction:
    """Return the loss that the settings name: (logprobs [K], entropies [K], micro-batch) -> (sum over tokens, sums).

    With old_logprobs = behaviour the ratio is taken against the engine's logprobs, and the correction against the
    learner's own, detached; with recompute the ratio is against the learner's logprobs before this step, and the
    correction is the old policy over the behaviour. One update a step: those are `logprobs`, detached.
    """
    recipe, learner = recipe_of(settings.learner), settings.learner
    policy_loss, correct = LOSSES[recipe.loss], CORRECTIONS[recipe.correction]
    clip = Clip(learner.clip_low, learner.clip_high)
    is_bypass = settings.policy.old_logprobs == "behaviour"

    def loss(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        behaviour = micro_batch.behaviour_logprobs
        old = behaviour if is_bypass else logprobs.detach()
        token_losses, is_clipped = policy_loss(logprobs, old, micro_batch.advantages, clip)
        ratio = log_ratio(logprobs.detach(), behaviour).exp()
        weights = correct(ratio)
        if is_bypass and recipe.loss == "ppo":
            # The clipped ratio already is the importance weight of the behaviour policy: only what the correction cuts
            # away is applied, or samples would be weighted twice.
            weights = (weights / ratio).clamp(max=1.0)
        return (token_losses * weights).sum(), _sums(logprobs.detach(), entropies, behaviour, ratio, is_clipped)

    return loss


def step_metrics(result: StepResult, inputs: StepInputs) -> dict[str, float]:
    """Return the learner's part of a step's metrics line."""
    sums, count = result.sums, max(1.0, result.sums["tokens"])
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "kl": sums["kl"] / count,
        "entropy": sums["entropy"] / count,
        "ratio_mean": sums["ratio"] / count,
        "clip_fraction": sums["clipped"] / count,
        "ratio_outside_share": sums["outside"] / count,
        "effective_sample_share": sums["ratio"] ** 2 / (count * max(1e-30, sums["ratio_squared"])),
        "logprob_difference_max": sums["max_difference"],
        "num_trained_tokens": inputs.num_model_tokens,
    }


def _sums(logprobs: Tensor, entropies: Tensor, behaviour: Tensor, ratio: Tensor, is_clipped: Tensor) -> Sums:
    """Return sums over a micro-batch's tokens. kl: of the behaviour from the learner, k3 estimator (Schulman, 2020)."""
    if not len(logprobs):
        return {"tokens": 0.0, **dict.fromkeys(_SUMS, 0.0)}  # every rank reduces the same keys
    difference = log_ratio(logprobs, behaviour)
    low, high = _OUTSIDE
    stacked = torch.stack(
        [
            entropies.sum(),
            (ratio - 1.0 - difference).sum(),
            ratio.sum(),
            ratio.square().sum(),
            is_clipped.float().sum(),
            ((ratio < low) | (ratio > high)).float().sum(),
            (logprobs - behaviour).abs().max(),
        ]
    ).tolist()
    return {"tokens": float(len(logprobs)), **dict(zip(_SUMS, stacked, strict=True))}


def _advantages(batch: Batch, settings: Settings) -> list[float]:
    """Return the advantage of every trajectory of the step."""
    estimate = ADVANTAGES[recipe_of(settings.learner).advantage]
    advantages = [0.0] * len(batch.facts)
    for group in batch.groups:
        rewards = torch.tensor([[batch.facts[index].reward for index in group]], dtype=torch.float64)
        for index, advantage in zip(group, estimate(rewards)[0].tolist(), strict=True):
            advantages[index] = advantage
    return advantages


def _sample(trajectory: Trajectory, advantage: float) -> Sample:
    return Sample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask.astype(bool),
        behaviour_logprobs=trajectory.behaviour_logprobs,
        advantage=advantage,
    )
