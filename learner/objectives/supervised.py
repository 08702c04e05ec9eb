"""Learning from rows: the step that all its objectives share, supervised fine-tuning, and the warm start."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.aggregate import AGGREGATES
from learner.algorithms.whiten import Reduce
from learner.data.packing import plan_step
from learner.data.sft_rows import SftRow
from learner.models.gradient import StepResult, Sums
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.roles import Roles
from learner.objectives.held_out import HeldOut, LossOf, MeanOf
from learner.objectives.policy_gradient import StepOutcome, describe_refused
from learner.objectives.step_plan import Divisor, StepPlan, plan_updates
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

_MAX_REFUSED_IN_A_ROW = 3


class RowObjective:
    """Takes the steps of a run that learns from rows, and scores its held-out rows."""

    def __init__(
        self,
        roles: Roles,
        settings: Settings,
        model: Path,
        reduce: Reduce,
        *,
        loss_of: LossOf,
        mean_of: MeanOf,
        divisor: Divisor = None,
    ) -> None:
        """divisor: as of `plan_updates`. The others: as of `HeldOut`."""
        self._roles, self._policy, self._learner = roles, roles.policy, settings.learner
        self._loss_of, self._divisor = loss_of, divisor
        self._held_out = HeldOut(roles, settings, model, loss_of, mean_of, reduce)

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Take one step and return its outcome. Collective. Arguments: as `PolicyGradient.take_step`."""
        held_out = self._held_out.before(batch.step)
        plan, results = self._update_all(batch, trajectories, policy_version)
        held_out |= self._held_out.after(batch.step)
        metrics = {
            "policy/loss": sum(result.loss for result in results) / len(results),
            "policy/grad_norm": sum(result.grad_norm for result in results) / len(results),
            "policy/num_updates": sum(result.applied for result in results),
            "policy/lr": results[-1].lr,
            "data/num_trained_tokens": sum(update.num_model_tokens for update in plan.updates),
            **self._means(results),
            **held_out,
        }
        return StepOutcome(any(result.applied for result in results), describe_refused(results), metrics)

    def _update_all(
        self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int
    ) -> tuple[StepPlan, list[StepResult]]:
        plan = self._plan(batch, trajectories, policy_version)
        micro_batches = self._with_columns(plan.micro_batches)
        return plan, [
            self._update(part, update.divisor)
            for _ in range(self._learner.num_epochs)
            for update, part in plan.split(micro_batches)
        ]

    def _plan(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepPlan:
        return plan_updates(
            batch,
            trajectories,
            policy_version,
            lambda counts: AGGREGATES["token_mean"](counts, 1.0),
            [True] * len(batch.facts),
            self._divisor,
            share_prompts=self._learner.share_prompts,
        )

    def _with_columns(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches with the columns that the loss reads."""
        return micro_batches

    def _update(self, micro_batches: Sequence[MicroBatch], divisor: float) -> StepResult:
        return self._policy.step(micro_batches, self._loss_of(micro_batches), divisor, with_entropy=False)

    def _means(self, results: Sequence[StepResult]) -> dict[str, float]:
        """Return further metrics from the sums of all updates."""
        return {}


class Supervised(RowObjective):
    """Takes the steps of a run with objective = sft."""

    def __init__(self, roles: Roles, settings: Settings, model: Path, reduce: Reduce) -> None:
        """Arguments: as of `HeldOut`."""
        super().__init__(roles, settings, model, reduce, loss_of=lambda _: self._loss, mean_of=_mean_per_token)

    def _loss(self, logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        return weighted_nll(logprobs, entropies, micro_batch)


def _mean_per_token(sums: Sums) -> dict[str, Tensor]:
    return {"loss": sums["loss"] / sums["num_tokens"]}


def run_sft(
    engine: PolicyEngine,
    rows: Sequence[SftRow],
    *,
    rows_per_step: int,
    max_steps: int,
    micro_batch_tokens: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train on the rows in their order, in a cycle. Every rank calls it with the same rows.

    A step's loss is the weighted mean of its tokens' negative logprobs, over all ranks. on_step: receives step, loss.
    Raises: OperatorError after three steps in a row without a finite gradient.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    refused = 0
    for step in range(1, max_steps + 1):
        first = (step - 1) * rows_per_step
        batch = [rows[i % len(rows)] for i in range(first, first + rows_per_step)]
        plan = plan_step([len(row.tokens) for row in batch], world_size, micro_batch_tokens)[rank]
        micro_batches = [make_micro_batch([_sample(batch[i]) for i in part]) for part in plan]
        weight = float(sum(row.weights.sum(dtype=np.float64) for row in batch))
        result = engine.step(micro_batches, weighted_nll, weight, with_entropy=False)
        refused = 0 if result.applied else refused + 1
        if refused == _MAX_REFUSED_IN_A_ROW:
            raise OperatorError(
                f"Supervised fine-tuning diverged: no finite gradient since step {step - refused + 1} of {max_steps}. "
                "Lower policy.warm_start.lr."
            )
        on_step(step, result.loss)


def weighted_nll(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
    """Return the weighted sum of the tokens' negative logprobs, and no metrics."""
    return -(micro_batch.weights * logprobs).sum(), {}


def _sample(row: SftRow) -> LearnerSample:
    return LearnerSample(row.tokens, row.weights > 0.0, np.zeros(len(row.tokens), np.float32), weights=row.weights)
