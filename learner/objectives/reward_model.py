"""Learning a reward model from pairs of a chosen and a rejected answer (Bradley and Terry).

A pair is a group of two trajectories, the chosen one first, and is whole in one micro-batch. r is a reward.

-logsigmoid(r_chosen - r_rejected - margin) + center_coefficient (r_chosen + r_rejected)^2

margin: arXiv 2307.09288, the row's column, else 0. Centering: arXiv 2312.09244.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.algorithms.whiten import Reduce
from learner.models.gradient import Sums
from learner.models.micro_batch import MicroBatch
from learner.models.reward_model import RewardEngine
from learner.models.roles import Roles
from learner.objectives.policy_gradient import StepOutcome
from learner.objectives.preference import PairObjective, pair_places, sums_of_answers
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

# Moments of the held-out rewards, which checkpoints keep for exported folders.
_SCALE = ("reward_mean", "reward_std")


class RewardModelling(PairObjective):
    """Takes the steps of a run with objective = reward_model."""

    def __init__(self, roles: Roles, settings: Settings, model: Path, reduce: Reduce) -> None:
        """Arguments: as of `HeldOut`."""
        self._engine, self._memory = cast(RewardEngine, roles.policy), roles.memory
        loss = partial(pair_loss, settings.preference.center_coefficient)
        super().__init__(roles, settings, model, reduce, loss, _held_out_means)
        if not (settings.data.eval and settings.eval.every_steps):
            for name in _SCALE:  # of weights that nothing measures any more
                self._memory.pop(f"held_out_{name}", None)
        self._keep_scale({})

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Take one step and return its outcome. Collective. Arguments: as `PolicyGradient.take_step`."""
        outcome = super().take_step(batch, trajectories, policy_version)
        self._keep_scale(outcome.metrics)
        return outcome

    def _keep_scale(self, held_out: Mapping[str, float]) -> None:
        """Keep the moments of new held-out rewards, and give the engine those of the newest."""
        if "eval/held_out/reward_mean" in held_out:
            self._memory.update({f"held_out_{name}": held_out[f"eval/held_out/{name}"] for name in _SCALE})
        mean, std = (self._memory.get(f"held_out_{name}") for name in _SCALE)
        if mean is not None and std is not None:
            self._engine.scale = mean, std


def pair_loss(
    center_coefficient: float, rewards: Tensor, entropies: Tensor, micro_batch: MicroBatch
) -> tuple[Tensor, Sums]:
    """Return (sum over pairs, sums over pairs). rewards: [S].

    The micro-batch's advantages are 1 plus the pair's margin for tokens of a chosen answer, -1 for others.
    """
    rewards = rewards.double()
    chosen, rejected = pair_places(micro_batch.numbers, rewards.device)
    counts = torch.tensor(micro_batch.counts, device=rewards.device).clamp(min=1)
    stated = sums_of_answers(micro_batch.advantages, micro_batch) / counts
    margins = (stated[chosen] + stated[rejected]).to(rewards.device)
    better, worse = rewards[chosen], rewards[rejected]
    losses = -logsigmoid(better - worse - margins) + center_coefficient * (better + worse) ** 2
    # The loss of an empty micro-batch is a zero of the model: every rank goes backward.
    loss = losses.sum() + 0.0 * rewards.sum()
    sums = {
        "num_pairs": torch.ones_like(better).sum(),
        "preference/accuracy": (better > worse).double().sum(),
        "preference/margin": (better - worse).sum(),
        "preference/chosen": better.sum(),
        "preference/rejected": worse.sum(),
        "squares": (better**2 + worse**2).sum(),
    }
    return loss, {name: each.detach() for name, each in sums.items()}


def _held_out_means(sums: Sums) -> dict[str, Tensor]:
    num = sums["num_pairs"]
    mean = (sums["preference/chosen"] + sums["preference/rejected"]) / (2 * num)
    variance = (sums["squares"] / (2 * num) - mean**2).clamp(min=0.0)
    found = {"loss": sums["loss"] / num, "reward_mean": mean, "reward_std": variance.sqrt()}
    return found | {name: sums[f"preference/{name}"] / num for name in ("accuracy", "margin")}
