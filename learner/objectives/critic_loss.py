"""The critic's loss of one micro-batch, and what is measured of it. Shape: K model tokens of a micro-batch."""

from collections.abc import Sequence

from torch import Tensor

from learner.algorithms.losses.value_loss import value_loss
from learner.models.critic import ValueLoss
from learner.models.step_result import StepResult, Sums
from learner.packing.micro_batch import MicroBatch


def make_critic_loss(clip: float) -> ValueLoss:
    """Return the loss: (values [K], micro-batch) -> (sum over the tokens that are trained, sums)."""

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
    """Return the critic's part of a step's metrics line. num_in_epoch: of the results, which are of all tokens."""
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
        "value_loss": sum(result.loss for result in results) / len(results),
        "critic_grad_norm": sum(result.grad_norm for result in results) / len(results),
        "num_critic_updates": sum(result.applied for result in results),
        "value_mean": sums["value"] / count,
        "return_mean": sums["return"] / count,
        "value_clip_fraction": num_clipped / num_tokens,
        # Not measured where all returns are one: there is nothing to explain.
        "value_explained": 1.0 - unexplained / spread if spread > 1e-12 else float("nan"),
    }
