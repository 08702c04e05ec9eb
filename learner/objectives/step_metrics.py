"""The learner's part of a step's metrics line, from sums over tokens.

Two kinds of sums: over all updates, and over the updates that compare the behaviour policy with the learner before
the step.

Shape: K model tokens of a micro-batch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.importance import log_ratio
from learner.models.gradient import ROUTER_AUX_LOSS, StepResult, Sums
from learner.models.micro_batch import MicroBatch

# Ratios outside these bounds are counted. A growing share shows drift by the engine or by staleness.
_OUTSIDE = (0.9, 1.1)


def token_sums(
    before: Tensor, entropies: Tensor, is_clipped: Tensor, micro_batch: MicroBatch, reference_kl: Tensor | None = None
) -> Sums:
    """Return sums over a micro-batch's tokens, with the same keys for every micro-batch.

    before: the learner's logprobs [K] to compare the behaviour policy's with. mismatch_kl: k3 estimator (Schulman,
    "Approximating KL divergence"). reference_kl: [K], of the learner from the reference; None: the key is absent.
    """
    behaviour = micro_batch.behaviour_logprobs
    difference = log_ratio(before, behaviour)
    ratio = difference.exp()
    low, high = _OUTSIDE
    kl = ratio - 1.0 - difference
    is_stale = _is_stale(micro_batch)
    sums = {
        "tokens": torch.ones_like(before).sum(),
        "entropy": entropies.sum(),
        "mismatch_kl": kl.sum(),
        "stale_tokens": is_stale.sum(),
        "stale_kl": (kl * is_stale).sum(),
        "advantage": micro_batch.advantages.sum(),
        "advantage_squared": micro_batch.advantages.square().sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "clipped": is_clipped.sum(),
        "outside": ((ratio < low) | (ratio > high)).sum(),
        "max_difference": (before - behaviour).abs().max() if len(before) else torch.zeros_like(ratio.sum()),
    }
    return sums if reference_kl is None else {**sums, "reference_kl": reference_kl.detach().sum()}


def step_metrics(results: Sequence[StepResult], fresh: Sequence[StepResult]) -> dict[str, float]:
    """Return the learner's part of a step's metrics line.

    results: of all updates; empty while only the critic is trained. fresh: of the updates that compare the behaviour
    policy with the learner before the step.
    """
    if not results:
        return {}
    sums, count = _add_sums(results)
    first, first_count = _add_sums(fresh)
    variance = sums["advantage_squared"] / count - (sums["advantage"] / count) ** 2
    applied = [result for result in results if result.applied]
    of_reference = {"policy/kl_reference": first["reference_kl"] / first_count} if "reference_kl" in first else {}
    router = {} if ROUTER_AUX_LOSS not in sums else {f"policy/{ROUTER_AUX_LOSS}": sums[ROUTER_AUX_LOSS] / count}
    return {
        **router,
        "policy/loss": _mean([result.loss for result in results]),
        "policy/grad_norm": _mean([result.grad_norm for result in results]),
        "policy/kl_sampler": first["mismatch_kl"] / first_count,
        "policy/entropy": sums["entropy"] / count,
        "policy/ratio_mean": first["ratio"] / first_count,
        "policy/clip_share": sums["clipped"] / count,
        "policy/ratio_outside_share": first["outside"] / first_count,
        "policy/effective_sample_share": first["ratio"] ** 2 / (first_count * max(1e-30, first["ratio_squared"])),
        "policy/logprob_difference_max": first["max_difference"],
        "policy/advantage_std": math.sqrt(max(0.0, variance)),
        "policy/num_updates": len(applied),
        "policy/lr": results[-1].lr,
        **_kl_by_age(first),
        **of_reference,
    }


def _kl_by_age(sums: dict[str, float]) -> dict[str, float]:
    """Return the KL of fresh samples and of stale ones; a key is absent when it has no samples."""
    stale, fresh = sums["stale_tokens"], sums["tokens"] - sums["stale_tokens"]
    found = {
        "policy/kl_fresh": (sums["mismatch_kl"] - sums["stale_kl"], fresh),
        "policy/kl_stale": (sums["stale_kl"], stale),
    }
    return {name: total / number for name, (total, number) in found.items() if number > 0}


def _is_stale(micro_batch: MicroBatch) -> Tensor:
    """Return which model tokens belong to trajectories with staleness above 0, [K] bool."""
    ages = micro_batch.staleness or (0,) * len(micro_batch.counts)
    of_segments = torch.tensor(ages) > 0
    counts = torch.tensor(micro_batch.counts)
    of_tokens = of_segments.repeat_interleave(counts, output_size=micro_batch.num_model_tokens)
    return of_tokens.to(micro_batch.targets.device)


def _add_sums(results: Sequence[StepResult]) -> tuple[dict[str, float], float]:
    """Return the sums of all results and their number of tokens, at least 1."""
    total: dict[str, float] = {}
    for result in results:
        for key, value in result.sums.items():
            old = total.get(key)
            total[key] = value if old is None else max(old, value) if key.startswith("max_") else old + value
    return total, max(1.0, total.get("tokens", 0.0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
