"""What one optimizer step is made of: a batch from the coordinator becomes micro-batches and a loss; a result, metrics.

Shapes: P prompts (groups), G samples of each, K model tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.by_name import algorithm_of
from learner.algorithms.corrections.token_weights import token_weights
from learner.algorithms.ratio import log_ratio
from learner.models.step_result import LossFunction, StepResult, Sums
from learner.packing.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

# A token whose two logprobs differ by more than this is counted: the engine or the staleness has drifted.
_OUTSIDE = (0.9, 1.1)


@dataclass(frozen=True)
class StepInputs:
    """A rank's part of a step."""

    micro_batches: tuple[MicroBatch, ...]  # this rank's
    loss: LossFunction  # of one micro-batch
    num_model_tokens: int  # of all ranks
    wait_s: float  # how long the batch took to come


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

    policy.old_logprobs = behaviour knows two policies: the ratio is learner / behaviour, and so is what the correction
    looks at. recompute knows three: the ratio is learner / old, the correction looks at old / behaviour, and old is the
    learner before the step, which is `logprobs` without a gradient while a step is one update.
    """
    algorithm = algorithm_of(settings.learner)
    policy_loss = algorithm.loss
    has_old_policy = settings.policy.old_logprobs == "recompute"

    def loss(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        behaviour, counts = micro_batch.behaviour_logprobs, micro_batch.counts
        before = logprobs.detach()
        old = before if has_old_policy else behaviour
        of_tokens, is_clipped = policy_loss.of_tokens(logprobs, old, micro_batch.advantages, counts, algorithm.clip)
        ratio = log_ratio(before, behaviour).exp()
        is_in_loss = policy_loss.has_ratio and not has_old_policy
        weights = token_weights(algorithm.correction, ratio, counts, algorithm.band, is_in_loss=is_in_loss)
        return (of_tokens * weights * micro_batch.weights).sum(), _sums(before, entropies, behaviour, ratio, is_clipped)

    return loss


def step_metrics(result: StepResult, inputs: StepInputs) -> dict[str, float]:
    """Return the learner's part of a step's metrics line."""
    sums, count = result.sums, max(1.0, result.sums["tokens"])
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "kl": sums["mismatch_kl"] / count,
        "entropy": sums["entropy"] / count,
        "ratio_mean": sums["ratio"] / count,
        "clip_fraction": sums["clipped"] / count,
        "ratio_outside_share": sums["outside"] / count,
        "effective_sample_share": sums["ratio"] ** 2 / (count * max(1e-30, sums["ratio_squared"])),
        "logprob_difference_max": sums["max_difference"],
        "num_trained_tokens": inputs.num_model_tokens,
    }


def _sums(logprobs: Tensor, entropies: Tensor, behaviour: Tensor, ratio: Tensor, is_clipped: Tensor) -> Sums:
    """Return sums over a micro-batch's tokens, the same keys for any.

    mismatch_kl: of the behaviour policy from the learner's, k3 estimator (Schulman, "Approximating KL divergence").
    """
    difference = log_ratio(logprobs, behaviour)
    low, high = _OUTSIDE
    return {
        "tokens": torch.ones_like(logprobs).sum(),
        "entropy": entropies.sum(),
        "mismatch_kl": (ratio - 1.0 - difference).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "clipped": is_clipped.sum(),
        "outside": ((ratio < low) | (ratio > high)).sum(),
        "max_difference": (logprobs - behaviour).abs().max() if len(logprobs) else torch.zeros_like(ratio.sum()),
    }


def _advantages(batch: Batch, settings: Settings) -> list[float]:
    """Return the advantage of every trajectory of the step."""
    estimate = algorithm_of(settings.learner).advantage.of_groups
    assert estimate is not None, "no advantage of single tokens is in the table yet"
    advantages = [0.0] * len(batch.facts)
    for group in batch.groups:
        rewards = torch.tensor([[batch.facts[index].reward for index in group]], dtype=torch.float64)
        lengths = torch.tensor([[batch.facts[index].num_model_tokens for index in group]], dtype=torch.float64)
        for index, advantage in zip(group, estimate(rewards, lengths)[0].tolist(), strict=True):
            advantages[index] = advantage
    return advantages


def _sample(trajectory: Trajectory, advantage: float) -> LearnerSample:
    return LearnerSample(
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask.astype(bool),
        behaviour_logprobs=trajectory.behaviour_logprobs,
        advantage=advantage,
    )
