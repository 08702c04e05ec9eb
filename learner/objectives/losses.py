"""The losses of policy and critic on one micro-batch, and the critic's metrics. Shape: K model tokens."""

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.by_name import algorithm_of
from learner.algorithms.importance import log_ratio, token_weights
from learner.algorithms.losses.value_loss import value_loss
from learner.models.critic import ValueLoss
from learner.models.gradient import LossFunction, StepResult, Sums
from learner.models.micro_batch import MicroBatch
from learner.objectives.advantages import ReferenceKl
from learner.objectives.step_metrics import token_sums
from protocol.settings.settings import Settings


def make_loss(settings: Settings, kl: ReferenceKl | None = None) -> LossFunction:
    """Return the policy's loss: (logprobs [K], entropies [K], micro-batch) -> (sum over tokens, sums).

    policy.old_logprobs = behaviour: loss and correction use the ratio learner / behaviour. recompute: the loss uses
    learner / old and the correction old / behaviour, where old is the learner before the step. A micro-batch without
    old logprobs belongs to a step of one update, where they equal `logprobs`.
    kl: adds its term to each token's loss, uncorrected.
    """
    algorithm = algorithm_of(settings.learner)
    policy_loss = algorithm.loss
    has_old_policy = settings.policy.old_logprobs == "recompute"

    def loss(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        behaviour, counts = micro_batch.behaviour_logprobs, micro_batch.counts
        now = logprobs.detach()
        before = now if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        old = before if has_old_policy else behaviour
        of_tokens, is_clipped = policy_loss.of_tokens(logprobs, old, micro_batch.advantages, counts, algorithm.clip)
        ratio = log_ratio(before if has_old_policy else now, behaviour).exp()
        is_in_loss = policy_loss.has_ratio and not has_old_policy
        weights = token_weights(algorithm.correction, ratio, counts, algorithm.band, is_in_loss=is_in_loss)
        corrected = of_tokens * weights
        reference_kl = None if kl is None else kl.of_tokens(before, micro_batch)
        if kl is not None and (in_loss := kl.in_loss(logprobs, micro_batch)) is not None:
            corrected = corrected + in_loss
        sums = token_sums(before, entropies, is_clipped, micro_batch, reference_kl)
        return (corrected * micro_batch.weights).sum(), sums

    return loss


def make_critic_loss(clip: float) -> ValueLoss:
    """Return the critic's loss: (values [K], micro-batch) -> (sum over the trained tokens, sums)."""

    def loss(values: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        before, returns = micro_batch.values, micro_batch.returns
        assert before is not None
        assert returns is not None
        of_tokens, is_clipped = value_loss(values, before, returns, clip)
        is_trained = (micro_batch.weights > 0.0).to(values.dtype)
        error = returns - before
        sums = {
            "tokens": is_trained.sum(),
            "clipped": (is_clipped * is_trained).sum(),
            "value": (before * is_trained).sum(),
            "return": (returns * is_trained).sum(),
            "return_squared": (returns.square() * is_trained).sum(),
            "error": (error * is_trained).sum(),
            "error_squared": (error.square() * is_trained).sum(),
        }
        return (of_tokens * is_trained).sum(), sums

    return loss


def critic_metrics(results: Sequence[StepResult], num_in_epoch: int) -> dict[str, float]:
    """Return the critic's part of a step's metrics line. num_in_epoch: number of updates that see every token once."""
    if not results:
        return {}
    keys = results[0].sums.keys()
    sums = {key: sum(result.sums[key] for result in results[:num_in_epoch]) for key in keys}
    count = max(1.0, sums["tokens"])
    spread = sums["return_squared"] / count - (sums["return"] / count) ** 2
    unexplained = sums["error_squared"] / count - (sums["error"] / count) ** 2
    num_clipped = sum(result.sums["clipped"] for result in results)
    num_tokens = max(1.0, sum(result.sums["tokens"] for result in results))
    return {
        "critic/loss": sum(result.loss for result in results) / len(results),
        "critic/grad_norm": sum(result.grad_norm for result in results) / len(results),
        "critic/num_updates": sum(result.applied for result in results),
        "critic/value_mean": sums["value"] / count,
        "critic/return_mean": sums["return"] / count,
        "critic/clip_share": num_clipped / num_tokens,
        # Equal returns have no variance to explain.
        "critic/explained_share": 1.0 - unexplained / spread if spread > 1e-12 else float("nan"),
    }
