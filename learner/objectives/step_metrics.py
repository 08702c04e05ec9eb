"""Where a step's sums become the learner's part of its metrics line.

Two kinds of sums: of each update as it is taken, and of how far the learner before its step is from who sampled, which
only an update that compares with that learner can measure.

Shape: K model tokens of a micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.ratio import log_ratio
from learner.models.step_result import StepResult, Sums
from learner.packing.micro_batch import MicroBatch

# A token whose two logprobs differ by more than this is counted: the engine or the staleness has drifted.
_OUTSIDE = (0.9, 1.1)


def token_sums(before: Tensor, entropies: Tensor, is_clipped: Tensor, micro_batch: MicroBatch) -> Sums:
    """Return sums over a micro-batch's tokens, the same keys for any.

    before: the learner's logprobs [K] that the behaviour policy's are compared with. mismatch_kl: of the behaviour
    policy from the learner's, k3 estimator (Schulman, "Approximating KL divergence").
    """
    behaviour = micro_batch.behaviour_logprobs
    difference = log_ratio(before, behaviour)
    ratio = difference.exp()
    low, high = _OUTSIDE
    return {
        "tokens": torch.ones_like(before).sum(),
        "entropy": entropies.sum(),
        "mismatch_kl": (ratio - 1.0 - difference).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "clipped": is_clipped.sum(),
        "outside": ((ratio < low) | (ratio > high)).sum(),
        "max_difference": (before - behaviour).abs().max() if len(before) else torch.zeros_like(ratio.sum()),
    }


def step_metrics(results: Sequence[StepResult], fresh: Sequence[StepResult]) -> dict[str, float]:
    """Return the learner's part of a step's metrics line.

    results: of all its updates. fresh: of those whose sums compare the behaviour policy with the learner before the
    step.
    """
    sums, count = _added(results)
    first, first_count = _added(fresh)
    applied = [result for result in results if result.applied]
    return {
        "loss": _mean([result.loss for result in results]),
        "grad_norm": _mean([result.grad_norm for result in results]),
        "kl": first["mismatch_kl"] / first_count,
        "entropy": sums["entropy"] / count,
        "ratio_mean": first["ratio"] / first_count,
        "clip_fraction": sums["clipped"] / count,
        "ratio_outside_share": first["outside"] / first_count,
        "effective_sample_share": first["ratio"] ** 2 / (first_count * max(1e-30, first["ratio_squared"])),
        "logprob_difference_max": first["max_difference"],
        "num_updates": len(applied),
    }


def _added(results: Sequence[StepResult]) -> tuple[dict[str, float], float]:
    """Return the results' sums, added, and how many tokens are in them, at least 1."""
    total: dict[str, float] = {}
    for result in results:
        for key, value in result.sums.items():
            old = total.get(key)
            total[key] = value if old is None else max(old, value) if key.startswith("max_") else old + value
    return total, max(1.0, total.get("tokens", 0.0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
