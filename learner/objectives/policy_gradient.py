"""The policy gradient: what a rank does with the batch of one step.

look        without a gradient: what the updates compare with        look.py
rewards     of each model token, or of each trajectory               token_rewards.py
advantages  from the group's rewards, or along the tokens            advantages.py
updates     mini-batches times epochs, an optimizer update each      policy_loss.py
metrics     the sums of all updates as the step's line               step_metrics.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.algorithms.aggregate import AGGREGATES
from learner.algorithms.by_name import algorithm_of
from learner.algorithms.whiten import Reduce
from learner.models.roles import Roles
from learner.models.step_result import StepResult
from learner.objectives.advantages import Discount, of_groups, of_tokens, whitened
from learner.objectives.look import look
from learner.objectives.policy_loss import make_loss
from learner.objectives.step_metrics import step_metrics
from learner.objectives.step_plan import StepPlan, plan_updates
from learner.objectives.token_rewards import token_rewards
from learner.packing.micro_batch import MicroBatch
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory


@dataclass(frozen=True)
class StepOutcome:
    """What a step did, the same on every rank."""

    applied: bool  # False: no update was finite, and nothing changed
    detail: str  # for people: why an update was not applied; empty when all were
    metrics: dict[str, float]  # the learner's part of the step's line


class PolicyGradient:
    """Takes the steps of a run. What it remembers from one to the next beside its models is in `state`."""

    def __init__(self, roles: Roles, settings: Settings, reduce: Reduce) -> None:
        """reduce: sums over all ranks, float64 on the CPU."""
        self._roles = roles
        self._settings = settings
        self._reduce = reduce
        self._algorithm = algorithm_of(settings.learner)
        self._loss = make_loss(settings)

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Return what the updates of one step did. trajectories: this rank's, by index into batch.facts.

        policy_version: of the weights before the step. Collective.
        """
        plan, micro_batches = self.prepare(batch, trajectories, policy_version)
        results = self._update(plan, micro_batches)
        fresh = results[: self._num_fresh(plan)]
        num_trained_tokens = sum(update.num_model_tokens for update in plan.updates)
        metrics = {**step_metrics(results, fresh), "num_trained_tokens": num_trained_tokens}
        return StepOutcome(any(result.applied for result in results), _detail(results), metrics)

    def prepare(
        self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int
    ) -> tuple[StepPlan, list[MicroBatch]]:
        """Return the step's plan and its micro-batches with every column that the updates need."""
        plan = plan_updates(batch, trajectories, policy_version, self._aggregate)
        micro_batches = look(plan.micro_batches, self._roles, with_old=self._has_old_column(plan))
        advantages = self._advantages(batch, micro_batches)
        with_advantages = [
            replace(each, advantages=advantage.float())
            for each, advantage in zip(micro_batches, advantages, strict=True)
        ]
        return plan, with_advantages

    def _aggregate(self, counts: Tensor) -> Tensor:
        loss = self._settings.loss
        return AGGREGATES[loss.aggregate](counts, float(loss.constant or self._settings.rollout.max_response_tokens))

    def _has_old_column(self, plan: StepPlan) -> bool:
        """Return whether the learner before the step is another one than the learner before some update."""
        is_asked = self._settings.policy.old_logprobs == "recompute"
        return is_asked and len(plan.updates) * self._settings.learner.num_epochs > 1

    def _num_fresh(self, plan: StepPlan) -> int:
        """Return how many updates, from the first, compare the behaviour policy with the learner before the step."""
        return len(plan.updates) if self._has_old_column(plan) else 1

    def _advantages(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        advantage = self._algorithm.advantage
        scores = torch.tensor([facts.reward for facts in batch.facts], dtype=torch.float64)
        if advantage.of_groups is not None:
            found = of_groups(micro_batches, scores, batch, advantage.of_groups)
        else:
            assert advantage.of_tokens is not None
            rewards = [token_rewards(each, scores) for each in micro_batches]
            found = of_tokens(
                micro_batches, rewards, advantage.of_tokens, Discount(self._algorithm.gamma, self._algorithm.lam)
            )
        return whitened(found, self._reduce) if self._algorithm.is_whitened else found

    def _update(self, plan: StepPlan, micro_batches: Sequence[MicroBatch]) -> list[StepResult]:
        results = []
        for _ in range(self._settings.learner.num_epochs):
            for update, part in plan.parts(micro_batches):
                results.append(self._roles.policy.step(part, self._loss, update.num_model_tokens))
        return results


def _detail(results: Sequence[StepResult]) -> str:
    refused = [result for result in results if not result.applied]
    if not refused:
        return ""
    where = "" if len(results) == 1 else f" in {len(refused)} of {len(results)} updates"
    return f"non-finite loss or gradient{where} (loss {refused[0].loss}, norm {refused[0].grad_norm})"
