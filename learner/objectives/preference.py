"""Learning from pairs of a chosen and a rejected answer: DPO and its relatives.

A pair is a group of two trajectories, the chosen one first, and is whole in one micro-batch. D is the difference of
the chosen and the rejected answer's log p, each less the reference's; L a mean log p; s = logsigmoid; e smoothing.

sigmoid  -(1 - e) s(beta D) - e s(-beta D)                      arXiv 2305.18290; e > 0: cDPO
robust   [-(1 - e) s(beta D) + e s(-beta D)] / (1 - 2 e)        arXiv 2403.00409
ipo      (D - 1 / (2 beta))^2                                   arXiv 2310.12036
hinge    max(0, 1 - beta D)                                     arXiv 2305.10425
simpo    -s(beta D - gamma), of means, no reference             arXiv 2405.14734
orpo     -beta s(log odds of chosen - of rejected), plus the chosen answer's mean negative logprob   arXiv 2403.07691
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.algorithms.whiten import Reduce
from learner.models.gradient import LossFunction, StepResult, Sums
from learner.models.micro_batch import MicroBatch
from learner.models.roles import Roles
from learner.objectives.held_out import MeanOf
from learner.objectives.policy_gradient import add_fixed_columns
from learner.objectives.supervised import RowObjective
from protocol.settings.preference import PreferenceSettings
from protocol.settings.settings import Settings


class PairObjective(RowObjective):
    """Takes the steps of a run that learns from pairs."""

    def __init__(
        self, roles: Roles, settings: Settings, model: Path, reduce: Reduce, loss: LossFunction, mean_of: MeanOf
    ) -> None:
        """loss: of a micro-batch, with "num_pairs" among its sums. The others: as of `HeldOut`."""
        super().__init__(
            roles,
            settings,
            model,
            reduce,
            loss_of=lambda _: loss,
            mean_of=mean_of,
            divisor=lambda counts: len(counts) // 2,
        )

    def _means(self, results: Sequence[StepResult]) -> dict[str, float]:
        num_pairs = max(1.0, sum(result.sums["num_pairs"] for result in results))
        names = [name for name in results[0].sums if name.startswith("preference/")]
        return {name: sum(result.sums[name] for result in results) / num_pairs for name in names}


class Preference(PairObjective):
    """Takes the steps of a run with objective = dpo."""

    def __init__(self, roles: Roles, settings: Settings, model: Path, reduce: Reduce) -> None:
        """Arguments: as of `HeldOut`."""
        super().__init__(roles, settings, model, reduce, PairLoss(settings.preference), _held_out_means)

    def _with_columns(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return add_fixed_columns(micro_batches, self._roles, with_old=False)


class PairLoss:
    """The sum of a micro-batch's losses of pairs, and sums for the metrics."""

    def __init__(self, settings: PreferenceSettings) -> None:
        self._settings = settings
        default = 1.0 if settings.loss == "orpo" else 0.0
        self._nll_coefficient = default if settings.nll_coefficient is None else settings.nll_coefficient

    def __call__(self, logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        """Return (sum over pairs, sums over pairs). Shapes: as `LossFunction`."""
        counts = torch.tensor(micro_batch.counts, device=logprobs.device)  # [S]
        own = sums_of_answers(logprobs, micro_batch)
        reference = micro_batch.reference_logprobs
        compared = own if reference is None else own - sums_of_answers(reference, micro_batch)
        if self._settings.average or not self._settings.has_reference:
            compared = compared / counts.clamp(min=1)
        chosen, rejected = pair_places(micro_batch.numbers, logprobs.device)
        beta = self._settings.beta
        losses = self._of_pairs(compared[chosen], compared[rejected])
        mean_nll = -(own / counts.clamp(min=1))[chosen]
        difference = compared[chosen] - compared[rejected]
        # An empty micro-batch has no pair, and its loss is a zero of the model: every rank goes backward.
        loss = losses.sum() + self._nll_coefficient * mean_nll.sum() + 0.0 * own.sum()
        sums = {
            "num_pairs": torch.ones_like(difference).sum(),
            "preference/accuracy": (difference > 0).double().sum(),
            "preference/margin": beta * difference.sum(),
            "preference/chosen": beta * compared[chosen].sum(),
            "preference/rejected": beta * compared[rejected].sum(),
            "preference/chosen_nll": mean_nll.sum(),
        }
        return loss, {name: each.detach() for name, each in sums.items()}

    def _of_pairs(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair from the log p that are compared, [P] each."""
        settings = self._settings
        beta, smoothing, difference = settings.beta, settings.label_smoothing, chosen - rejected
        match settings.loss:
            case "sigmoid":
                return -(1 - smoothing) * logsigmoid(beta * difference) - smoothing * logsigmoid(-beta * difference)
            case "robust":
                right, wrong = logsigmoid(beta * difference), logsigmoid(-beta * difference)
                return (-(1 - smoothing) * right + smoothing * wrong) / (1 - 2 * smoothing)
            case "ipo":
                return (difference - 1 / (2 * beta)) ** 2
            case "hinge":
                return torch.relu(1 - beta * difference)
            case "simpo":
                return -logsigmoid(beta * difference - settings.gamma)
        return -beta * logsigmoid(difference - (_log1mexp(chosen) - _log1mexp(rejected)))


def sums_of_answers(of_tokens: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return the sum over each trajectory's model tokens, float64 [S]. of_tokens: [K]."""
    return torch.stack([part.sum() for part in torch.split(of_tokens.double(), list(micro_batch.counts))])


def pair_places(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places in the micro-batch of the chosen and of the rejected answers, [P] each, by pair.

    numbers: of the trajectories in their step, where pair i has 2 i and 2 i + 1; -1: none.
    """
    place = {number: i for i, number in enumerate(numbers) if number >= 0}
    pairs = [(place[number], place[number + 1]) for number in sorted(place) if number % 2 == 0]
    both = torch.tensor(pairs, dtype=torch.long, device=device).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _log1mexp(logp: Tensor) -> Tensor:
    """Return log(1 - exp(logp)) for logp below 0, exact near 0 too; at 0 the smallest positive distance counts."""
    below = logp.clamp(max=-torch.finfo(logp.dtype).tiny)
    return torch.where(below > -math.log(2), (-torch.expm1(below)).log(), torch.log1p(-below.exp()))


def _held_out_means(sums: Sums) -> dict[str, Tensor]:
    names = {"loss": "loss", "preference/accuracy": "accuracy", "preference/margin": "margin"}
    return {name: sums[key] / sums["num_pairs"] for key, name in names.items()}
