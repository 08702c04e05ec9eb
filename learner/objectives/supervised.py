"""Supervised fine-tuning with the engine and the packing of RL: the steps of a run, and the warm start."""

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
from learner.objectives.held_out import HeldOut
from learner.objectives.policy_gradient import StepOutcome
from learner.objectives.step_plan import plan_updates
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

_MAX_REFUSED_IN_A_ROW = 3


class Supervised:
    """Takes the steps of a run with objective = sft."""

    def __init__(self, roles: Roles, settings: Settings, model: Path, reduce: Reduce) -> None:
        """Arguments: as of `HeldOut`."""
        self._policy = roles.policy
        self._num_epochs = settings.learner.num_epochs
        self._share_prompts = settings.learner.share_prompts
        self._held_out = HeldOut(roles, settings, model, lambda _: self._held_out_loss, _mean_per_token, reduce)

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Take one step and return its outcome. Collective. Arguments: as `PolicyGradient.take_step`."""
        held_out = self._held_out.before(batch.step)
        is_trained = [True] * len(batch.facts)

        def weigh(counts: Tensor) -> Tensor:
            return AGGREGATES["token_mean"](counts, 1.0)

        plan = plan_updates(batch, trajectories, policy_version, weigh, is_trained, share_prompts=self._share_prompts)
        results = [
            self._update(part, update.divisor)
            for _ in range(self._num_epochs)
            for update, part in plan.split(plan.micro_batches)
        ]
        held_out |= self._held_out.after(batch.step)
        return outcome_of(results, sum(update.num_model_tokens for update in plan.updates), held_out)

    def _update(self, micro_batches: Sequence[MicroBatch], divisor: float) -> StepResult:
        return self._policy.step(micro_batches, weighted_nll, divisor, with_entropy=False)

    def _held_out_loss(self, logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        return weighted_nll(logprobs, entropies, micro_batch)


def outcome_of(results: Sequence[StepResult], num_trained_tokens: int, others: Mapping[str, float]) -> StepOutcome:
    """Return the outcome of a step on rows from those of its updates. others: further metrics."""
    refused = [result for result in results if not result.applied]
    detail = f"non-finite loss or gradient (loss {refused[0].loss}, norm {refused[0].grad_norm})" if refused else ""
    metrics = {
        "policy/loss": sum(result.loss for result in results) / len(results),
        "policy/grad_norm": sum(result.grad_norm for result in results) / len(results),
        "policy/num_updates": len(results) - len(refused),
        "policy/lr": results[-1].lr,
        "data/num_trained_tokens": num_trained_tokens,
        **others,
    }
    return StepOutcome(len(refused) < len(results), detail, metrics)


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
