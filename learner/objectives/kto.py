"""Learning from single answers that are desirable or not: KTO.

A row is a group of two trajectories: its answer with the reward 1 or -1, and the same prompt with another row's answer
and the reward 0. d is an answer's sum of log p less the reference's.

z            max(0, mean of d over the other rows' answers of the update, on all ranks), without a gradient
desirable    desirable_weight (1 - sigmoid(beta (d - z)))
undesirable  undesirable_weight (1 - sigmoid(beta (z - d)))     arXiv 2402.01306, eq. 7
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from learner.algorithms.whiten import Reduce
from learner.models.gradient import LossFunction, StepResult, Sums
from learner.models.micro_batch import MicroBatch
from learner.models.roles import Roles
from learner.objectives.policy_gradient import add_fixed_columns
from learner.objectives.preference import sums_of_answers
from learner.objectives.step_plan import StepPlan
from learner.objectives.supervised import RowObjective
from protocol.settings.preference import PreferenceSettings
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory


class Kto(RowObjective):
    """Takes the steps of a run with objective = kto."""

    def __init__(self, roles: Roles, settings: Settings, model: Path, reduce: Reduce) -> None:
        """Arguments: as of `HeldOut`."""
        self._settings, self._reduce = settings.preference, reduce
        super().__init__(
            roles, settings, model, reduce, loss_of=self._labelled_loss, mean_of=_held_out_means, divisor=len
        )

    def _update_all(
        self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int
    ) -> tuple[StepPlan, list[StepResult]]:
        plan, of_others = (self._plan(half, trajectories, policy_version) for half in _halves(batch))
        rows, others = (
            add_fixed_columns(each.micro_batches, self._roles, with_old=False) for each in (plan, of_others)
        )
        return plan, [
            self._policy.step(own, self._loss_of(compared), update.divisor, with_entropy=False)
            for _ in range(self._learner.num_epochs)
            for (update, own), (_, compared) in zip(plan.split(rows), of_others.split(others), strict=True)
        ]

    def _means(self, results: Sequence[StepResult]) -> dict[str, float]:
        return _means_of_rows(
            {name: sum(result.sums[name] for result in results) for name in results[0].sums}, "preference/"
        )

    def _labelled_loss(self, micro_batches: Sequence[MicroBatch]) -> LossFunction:
        """Return the loss with z of the other rows' answers in these micro-batches of all ranks. Collective."""
        total = torch.zeros(2, dtype=torch.float64)
        for each in micro_batches:
            is_other = (_signs(each) == 0) & (torch.tensor(each.counts) > 0)
            gains = _gains(self._roles.policy.logprobs(each).cpu(), each)[is_other]
            total += torch.stack([gains.sum(), is_other.sum()])
        gain, count = self._reduce(total).tolist()
        return partial(labelled_loss, self._settings, max(0.0, gain / max(1.0, count)))


def labelled_loss(
    settings: PreferenceSettings, z: float, logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch
) -> tuple[Tensor, Sums]:
    """Return (sum over rows, sums over rows). Shapes: as `LossFunction`."""
    signs, gains = _signs(micro_batch), _gains(logprobs, micro_batch)
    is_desirable, is_undesirable = (signs > 0).double(), (signs < 0).double()
    weights = settings.desirable_weight * is_desirable + settings.undesirable_weight * is_undesirable  # others: 0
    better = signs * (gains - z)
    rewards = settings.beta * gains
    # The loss of an empty micro-batch is a zero of the model: every rank goes backward.
    loss = (weights * (1 - torch.sigmoid(settings.beta * better))).sum()
    num_rows = (is_desirable + is_undesirable).sum()
    sums = {
        "num_rows": num_rows,
        "num_chosen": is_desirable.sum(),
        "preference/accuracy": (better > 0).double().sum(),
        "preference/kl": z * num_rows,
        "preference/chosen": (rewards * is_desirable).sum(),
        "preference/rejected": (rewards * is_undesirable).sum(),
    }
    return loss, {name: each.detach() for name, each in sums.items()}


def _signs(micro_batch: MicroBatch) -> Tensor:
    """Return 1 for desirable answers, -1 for undesirable ones, 0 for other rows' answers, [S]."""
    return sums_of_answers(micro_batch.advantages, micro_batch).sign()


def _gains(logprobs: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return each answer's sum of log p less the reference's, float64 [S]."""
    reference = micro_batch.reference_logprobs
    assert reference is not None
    return sums_of_answers(logprobs, micro_batch) - sums_of_answers(reference, micro_batch)


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    """Return the batch's rows, and the same prompts with other rows' answers: the even and the odd trajectories."""
    return tuple(  # type: ignore[return-value]
        msgspec.structs.replace(
            batch,
            planned=[number for number in batch.planned if number % 2 == half],
            micro_batches=[[number for number in part if number % 2 == half] for part in batch.micro_batches],
            mini_batches=[
                msgspec.structs.replace(part, num_planned=part.num_planned // 2) for part in batch.mini_batches
            ],
        )
        for half in (0, 1)
    )


def _means_of_rows(totals: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the means of the rows with this prefix; of answers of one label only where there are such."""
    num_rows, num_chosen = totals["num_rows"], totals["num_chosen"]
    found = {f"{prefix}{name}": totals[f"preference/{name}"] / num_rows for name in ("accuracy", "kl")}
    if num_chosen > 0:
        found[f"{prefix}chosen"] = totals["preference/chosen"] / num_chosen
    if num_rows > num_chosen:
        found[f"{prefix}rejected"] = totals["preference/rejected"] / (num_rows - num_chosen)
    if num_rows > num_chosen > 0:
        found[f"{prefix}margin"] = found[f"{prefix}chosen"] - found[f"{prefix}rejected"]
    return found


def _held_out_means(sums: Sums) -> dict[str, float]:
    means = _means_of_rows({name: float(each) for name, each in sums.items()}, "")
    loss = float(sums["loss"] / sums["num_rows"])
    return {"loss": loss, **{name: means[name] for name in ("accuracy", "margin") if name in means}}
