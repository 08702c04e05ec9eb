"""The policy gradient: one step of a rank, from a batch to metrics.

rewards     shaped rewards of each trajectory                         advantages.py
plan        micro-batches of each update                              step_plan.py
columns     values, reference and old logprobs, without a gradient    add_fixed_columns
advantages  from the group's rewards, or along a trajectory's tokens  advantages.py
updates     mini-batches times epochs, of the policy, then the critic make_loss, make_critic_loss
            or the gradients of the parts of a step, then one update  take_part
metrics     sums of all updates as the step's metrics line            step_metrics.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from msgspec import UNSET
from torch import Tensor

from learner.algorithms.aggregate import AGGREGATES, divisor_of
from learner.algorithms.by_name import algorithm_of
from learner.algorithms.importance import log_ratio, token_weights
from learner.algorithms.losses.value_loss import value_loss
from learner.algorithms.whiten import Reduce
from learner.models.critic import ValueLoss
from learner.models.gradient import LossFunction, StepResult, Sums, add_sums
from learner.models.micro_batch import MicroBatch
from learner.models.reference import ReferenceModel
from learner.models.roles import CRITIC_STEPS, Roles
from learner.objectives.advantages import (
    ReferenceKl,
    of_groups,
    of_tokens,
    shaped_rewards,
    token_rewards,
    trajectory_sums,
    whiten_step,
)
from learner.objectives.step_metrics import step_metrics, token_sums
from learner.objectives.step_plan import Divisor, StepPlan, plan_updates
from protocol.errors import SettingsError
from protocol.settings.settings import Settings
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

# Takes the logprobs [K] and entropies [K] of a micro-batch's tokens before each update.
OnTokens = Callable[[Tensor, Tensor, MicroBatch], None]


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step, the same on every rank."""

    applied: bool  # some weight changed; False: no update was finite
    detail: str  # reason why an update was not applied; empty when all were
    metrics: dict[str, float]  # learner's part of the step's metrics line


@dataclass
class Parts:
    """The parts of a step whose gradients are added, and not applied yet."""

    sums: Sums = field(default_factory=dict)
    weight: float = 0.0  # divides the gradient
    num_model_tokens: int = 0
    num_planned: int = 0  # trajectories in the loss


class PolicyGradient:
    """Takes the steps of a run. Its state between steps is `roles.memory`, which checkpoints save."""

    def __init__(self, roles: Roles, settings: Settings, reduce: Reduce) -> None:
        """reduce: sums over all ranks, float64 on the CPU.

        Raises: SettingsError for a user's advantage that cannot be loaded, or that cannot use rewards.credit.
        """
        self.on_tokens: OnTokens | None = None
        self._roles = roles
        self._settings = settings
        self._reduce = reduce
        self.algorithm = algorithm_of(settings.learner)
        if settings.rewards.credit == "turn" and self.algorithm.advantage.of_tokens is None:
            raise SettingsError(
                f"settings: rewards.credit = turn gives the tokens of an answer different rewards, and "
                f"learner.advantage = {settings.learner.advantage} gives them one advantage. Make it an advantage of "
                "tokens, or set rewards.credit to conversation."
            )
        self._kl = ReferenceKl(settings.kl, roles.memory)
        self._loss = make_loss(settings, self._kl)
        self._critic_loss = make_critic_loss(settings.critic.value_clip)
        self._parts = Parts()

    def take_part(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> None:
        """Add the gradient of a part of a step; `take_step` with the last part takes it. Collective."""
        plan, micro_batches = self.prepare(batch, trajectories, policy_version)
        (update,) = plan.updates
        add_sums(self._parts.sums, self._roles.policy.add_part(micro_batches, self._heard_loss()))
        self._parts.weight += update.weight
        self._parts.num_model_tokens += update.num_model_tokens
        self._parts.num_planned += len(batch.planned)

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Take one step and return its outcome. Collective.

        trajectories: this rank's, by index into batch.facts. policy_version: of the weights before the step.
        batch: the whole step, or its last part.
        """
        if batch.part:
            return self._take_parts(batch, trajectories, policy_version)
        before = dict(self._roles.memory)
        plan, micro_batches = self.prepare(batch, trajectories, policy_version)
        policy, critic = self._roles.policy, self._roles.critic
        critic_steps = before.get(CRITIC_STEPS, 0.0)
        is_warming_up = critic is not None and critic_steps < self._settings.critic.warmup_steps
        if critic is not None:
            self._roles.memory[CRITIC_STEPS] = critic_steps + 1.0
        of_policy = [] if is_warming_up else self._update(plan, micro_batches, policy.step, self._heard_loss())
        # A step without a policy update is recorded as skipped, so it must not change the critic either.
        is_skipped = bool(of_policy) and not any(result.applied for result in of_policy)
        of_critic = (
            [] if is_skipped or critic is None else self._update(plan, micro_batches, critic.step, self._critic_loss)
        )
        metrics = {
            **step_metrics(of_policy, of_policy[: self._num_fresh(plan)]),
            **critic_metrics(of_critic, len(plan.updates)),
            "data/num_trained_tokens": sum(update.num_model_tokens for update in plan.updates),
        }
        self._follow_reference(batch.step, metrics, len(batch.planned))
        if not (is_applied := any(result.applied for result in of_policy or of_critic)):
            # A skipped step leaves the memory as it was: its statistics may be the non-finite numbers.
            self._roles.memory.clear()
            self._roles.memory.update(before)
        return StepOutcome(is_applied, describe_refused([*of_policy, *of_critic]), metrics)

    def _take_parts(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Take a step whose other parts were taken."""
        before = dict(self._roles.memory)
        self.take_part(batch, trajectories, policy_version)
        parts, self._parts = self._parts, Parts()
        result = self._roles.policy.update(parts.sums, parts.weight or 1.0, is_divided=False)
        metrics = {**step_metrics([result], [result]), "data/num_trained_tokens": parts.num_model_tokens}
        self._follow_reference(batch.step, metrics, parts.num_planned)
        if not result.applied:
            self._roles.memory.clear()
            self._roles.memory.update(before)
        return StepOutcome(result.applied, describe_refused([result]), metrics)

    def prepare(
        self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int
    ) -> tuple[StepPlan, list[MicroBatch]]:
        """Return the step's plan and its micro-batches with every column that the updates need."""
        shaped = shaped_rewards(batch, self._settings, self._roles.memory)
        is_trained, divisor = shaped.is_trained.tolist(), self._divisor(batch)
        plan = plan_updates(
            batch,
            trajectories,
            policy_version,
            self._aggregate,
            is_trained,
            divisor,
            share_prompts=self._settings.learner.share_prompts,
        )
        micro_batches = add_fixed_columns(plan.micro_batches, self._roles, with_old=self._has_old_column(plan))
        advantages = self._advantages(batch, micro_batches, shaped.rewards)
        if self._roles.critic is not None:
            micro_batches = [_with_returns(*pair) for pair in zip(micro_batches, advantages, strict=True)]
        if self.algorithm.is_whitened:
            advantages = whiten_step(micro_batches, advantages, self._reduce)
        # Neither whitened nor summed over later tokens: a teacher's judgement of each token.
        pairs = zip(micro_batches, advantages, strict=True)
        advantages = [advantage + self._kl.penalties(each, "advantage") for each, advantage in pairs]
        return plan, [
            replace(each, advantages=advantage.float())
            for each, advantage in zip(micro_batches, advantages, strict=True)
        ]

    def _aggregate(self, counts: Tensor) -> Tensor:
        settings = self._settings
        constant = settings.loss.constant or settings.rollout.max_response_tokens
        return AGGREGATES[settings.loss.aggregate](counts, float(constant))

    def _divisor(self, batch: Batch) -> Divisor:
        """Return what divides the loss: the model tokens, or what the parts of a step add up to."""
        name = self._settings.loss.aggregate
        return None if batch.part is UNSET else lambda counts: divisor_of(name, counts)

    def _has_old_column(self, plan: StepPlan) -> bool:
        """Return whether the updates compare with the learner before the step, rather than before each update."""
        has_old_policy = self._settings.policy.old_logprobs == "recompute"
        num_updates = len(plan.updates) * self._settings.learner.num_epochs
        has_kl_before = bool(self._settings.kl.coefficient) and not self._kl.is_in_loss
        return has_kl_before or (has_old_policy and num_updates > 1)

    def _num_fresh(self, plan: StepPlan) -> int:
        """Return how many of the first updates compare the behaviour policy with the learner before the step."""
        return len(plan.updates) if self._has_old_column(plan) else 1

    def _advantages(self, batch: Batch, micro_batches: Sequence[MicroBatch], scores: Tensor) -> list[Tensor]:
        """Return the advantages of each micro-batch's tokens, [K] float64. scores: of the step's trajectories."""
        advantage = self.algorithm.advantage
        penalties = [self._kl.penalties(each, "reward") for each in micro_batches]
        if advantage.of_groups is not None:
            if self._kl.is_in_reward:
                pairs = zip(micro_batches, penalties, strict=True)
                own = torch.stack([trajectory_sums(each, penalty, len(scores)) for each, penalty in pairs]).sum(0)
                scores = scores + self._reduce(own)
            return of_groups(micro_batches, scores, batch, advantage.of_groups)
        assert advantage.of_tokens is not None
        pairs = zip(micro_batches, penalties, strict=True)
        is_by_turn = self._settings.rewards.credit == "turn"
        of_turns = [facts.turn_rewards for facts in batch.facts] if is_by_turn else None
        rewards = [token_rewards(each, scores, of_turns) + penalty for each, penalty in pairs]
        return of_tokens(micro_batches, rewards, advantage.of_tokens, self.algorithm.gamma, self.algorithm.lam)

    def _heard_loss(self) -> LossFunction:
        return self._loss if self.on_tokens is None else _with_listener(self._loss, self.on_tokens)

    def _update(
        self,
        plan: StepPlan,
        micro_batches: Sequence[MicroBatch],
        step: Callable[..., StepResult],
        loss: LossFunction | ValueLoss,
    ) -> list[StepResult]:
        """Return the outcomes of a model's updates: each mini-batch, as often as the settings say."""
        return [
            step(part, loss, update.divisor)
            for _ in range(self._settings.learner.num_epochs)
            for update, part in plan.split(micro_batches)
        ]

    def _follow_reference(self, step: int, metrics: dict[str, float], num_trajectories: int) -> None:
        """Adapt the coefficient of the KL, add it to the metrics, and refresh the reference when it is due."""
        if self._roles.reference is not None:
            metrics["policy/kl_coefficient"] = self._kl.coefficient
            if "policy/kl_reference" in metrics:
                self._kl.follow(metrics["policy/kl_reference"], num_trajectories)
        every, reference = self._settings.reference.refresh_every_steps, self._roles.reference
        if isinstance(reference, ReferenceModel) and every and step % every == 0:
            reference.refresh(self._roles.policy)


def _with_listener(loss: LossFunction, on_tokens: OnTokens) -> LossFunction:
    def heard_loss(logprobs: Tensor, entropies: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        on_tokens(logprobs.detach(), entropies.detach(), micro_batch)
        return loss(logprobs, entropies, micro_batch)

    return heard_loss


def _with_returns(micro_batch: MicroBatch, advantages: Tensor) -> MicroBatch:
    """Return the micro-batch with the critic's targets: advantage plus value, before whitening."""
    assert micro_batch.values is not None
    return replace(micro_batch, returns=(advantages + micro_batch.values.double()).float())


def describe_refused(results: Sequence[StepResult]) -> str:
    """Return why some of these updates were not applied; empty when all were."""
    refused = [result for result in results if not result.applied]
    if not refused:
        return ""
    where = "" if len(results) == 1 else f" in {len(refused)} of {len(results)} updates"
    return f"non-finite loss or gradient{where} (loss {refused[0].loss}, norm {refused[0].grad_norm})"


def add_fixed_columns(micro_batches: Sequence[MicroBatch], roles: Roles, *, with_old: bool) -> list[MicroBatch]:
    """Return the micro-batches with values, reference and old logprobs, computed before the first update.

    A column is added for each role that exists; old logprobs only `with_old`. Collective: every rank has the same
    number of micro-batches. The columns are on the CPU.
    """
    found = list(micro_batches)
    if with_old:
        found = [replace(each, old_logprobs=roles.policy.logprobs(each).cpu()) for each in found]
    if (reference := roles.reference) is not None:
        with reference.in_use():
            found = [replace(each, reference_logprobs=reference.logprobs(each).cpu()) for each in found]
    if (critic := roles.critic) is not None:
        found = [replace(each, values=critic.values(each).cpu()) for each in found]
    return found


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
