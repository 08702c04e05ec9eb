"""Every setting of a run, one section per room, with its unit, range and meaning.

Names follow the command line: `--learner.max_staleness 1`.
Cross-field checks live in `Settings` itself, so that a wrong combination is refused before anything starts.
"""

import math
from typing import Any, Self

from pydantic import (
    model_validator,
)

from protocol.settings.algorithm.contradictions import (
    check_credit,
    check_equal_groups,
    check_groups,
    check_kl_controller,
    check_loss,
    check_shaping,
)
from protocol.settings.algorithm.kl import KlSettings
from protocol.settings.algorithm.loss import LossSettings
from protocol.settings.algorithm.recipes import over_recipe
from protocol.settings.data import DataSettings
from protocol.settings.learner import LearnerSettings
from protocol.settings.policy import PolicySection
from protocol.settings.quality.evaluation import EvalSettings
from protocol.settings.quality.filter import FilterSettings
from protocol.settings.quality.health import HealthSettings
from protocol.settings.report import ReportSettings
from protocol.settings.retriever import RetrieverSettings
from protocol.settings.rewards import RewardsSettings
from protocol.settings.roles.critic import CriticSettings
from protocol.settings.roles.placement import PlacementSettings, check_placement
from protocol.settings.roles.reference import ReferenceSettings
from protocol.settings.rollout import AgentsSettings, RolloutSettings, SamplingSettings
from protocol.settings.run import RunSettings
from protocol.settings.section import Section
from protocol.settings.tools.offered import BUNDLED_TOOLS, ToolsSettings
from protocol.settings.weights import WeightsSettings

# What one message to a rank may name (protocol.wire.messages.Batch).
_MAX_STEP_SAMPLES = 1 << 20


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = RunSettings()  # name, seed, length and folder of the run
    policy: PolicySection = PolicySection()  # the model and how it is fine-tuned first
    data: DataSettings = DataSettings()  # where prompts come from
    rollout: RolloutSettings = RolloutSettings()  # engines, episodes, budgets and time limits
    sampling: SamplingSettings = SamplingSettings()  # how samples are drawn, beside rollout.temperature
    tools: ToolsSettings = ToolsSettings()  # what the policy may call, with rollout.environment = tools
    agents: AgentsSettings = AgentsSettings()  # programs that generate through the servers' OpenAI address
    retriever: RetrieverSettings = RetrieverSettings()  # where searches go
    rewards: RewardsSettings = RewardsSettings()  # who scores, and how parts become one reward
    learner: LearnerSettings = LearnerSettings()  # ranks, steps, staleness, optimizer, algorithm, checkpoints
    filter: FilterSettings = FilterSettings()  # which groups are trained, and which are replaced
    loss: LossSettings = LossSettings()  # how the losses of tokens become one number
    kl: KlSettings = KlSettings()  # what holds the policy near a reference model
    critic: CriticSettings = CriticSettings()  # what values states, for the advantages that need it
    reference: ReferenceSettings = ReferenceSettings()  # what the policy is held near by the KL
    weights: WeightsSettings = WeightsSettings()  # how pushes travel to the rollout servers
    placement: PlacementSettings = PlacementSettings()  # which nodes and GPUs ranks and servers get
    eval: EvalSettings = EvalSettings()  # held-out scores while training
    health: HealthSettings = HealthSettings()  # which figures are alarming, and whether they end the run
    report: ReportSettings = ReportSettings()  # what a run shows of itself

    @model_validator(mode="before")
    @classmethod
    def _lay_over_recipe(cls, given: Any) -> Any:
        return over_recipe(given)

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        check_groups(self.learner, self.rollout)
        check_equal_groups(self.learner, self.rewards, self.kl)
        check_credit(self.learner, self.rewards)
        check_loss(self.learner, self.loss, self.kl)
        check_kl_controller(self.learner, self.rollout, self.kl)
        check_shaping(self.rewards, self.rollout)
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        check_placement(self.placement, self.learner, self.rollout, self.weights)
        return self

    @model_validator(mode="after")
    def _check_across_fields(self) -> Self:
        learner, rollout = self.learner, self.rollout
        if learner.groups_per_step % learner.num_ranks:
            divisors = [n for n in range(1, learner.groups_per_step + 1) if learner.groups_per_step % n == 0]
            raise ValueError(
                f"learner.groups_per_step = {learner.groups_per_step} cannot be split over {learner.num_ranks} ranks. "
                f"Use a multiple of {learner.num_ranks}, or set learner.num_ranks to one of {divisors}."
            )
        if self.critic.offload and self.critic.zero_stage is None and learner.zero_stage == 0:
            raise ValueError(
                "critic.offload = true needs ZeRO stage 2 or 3, and learner.zero_stage is 0. Set critic.zero_stage."
            )
        if learner.num_mini_batches > learner.groups_per_step:
            raise ValueError(
                f"learner.num_mini_batches = {learner.num_mini_batches} is more than "
                f"learner.groups_per_step = {learner.groups_per_step}: a mini-batch is made of whole groups. "
                "Lower the first or raise the second."
            )
        if (num_samples := learner.groups_per_step * rollout.group_size) > _MAX_STEP_SAMPLES:
            raise ValueError(
                f"learner.groups_per_step = {learner.groups_per_step} times rollout.group_size = {rollout.group_size} "
                f"is {num_samples} samples in one step, at most {_MAX_STEP_SAMPLES}. Lower one of them."
            )
        if rollout.max_response_tokens >= rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_response_tokens = {rollout.max_response_tokens} leaves no room for a prompt in "
                f"rollout.max_context_tokens = {rollout.max_context_tokens}. Lower the first or raise the second."
            )
        if self.eval.every_steps and not self.data.eval and not self.eval.sets:
            raise ValueError(
                f"eval.every_steps = {self.eval.every_steps} needs held-out prompts. "
                "Set data.eval or eval.sets, or eval.every_steps to 0."
            )
        return self

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        rewards, names = self.rewards, [endpoint.name for endpoint in self.rewards.endpoints]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards.endpoints has the names {names}. Give each endpoint a name of its own.")
        weights = [endpoint.weight for endpoint in rewards.endpoints]
        if names and rewards.combine in ("product", "shard") and not any(weights):
            raise ValueError(
                f"rewards.combine = {rewards.combine} over endpoints that all have weight 0. Change a weight, or use "
                "sum."
            )
        if rewards.combine == "mean" and names and math.fsum(weights) == 0:
            raise ValueError(
                "rewards.combine = mean over endpoints whose weights add up to 0. Change a weight, or use sum."
            )
        return self

    @model_validator(mode="after")
    def _check_health(self) -> Self:
        health = self.health
        if health.stop_after and (not health.alarms or health.stop_after < health.patience):
            raise ValueError(
                f"health.stop_after = {health.stop_after} ends a run by an alarm, which begins after health.patience = "
                f"{health.patience} steps{'' if health.alarms else ' and is turned off (health.alarms)'}. "
                "Raise the first, lower the second, or set health.alarms to true."
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        reshaping = self.sampling.reshaping
        if reshaping and self.run.max_steps and not self.sampling.only_eval:
            name, value = next(iter(reshaping.items()))
            raise ValueError(
                f"sampling.{name} = {value} draws from another distribution than the policy's: the learner's "
                "probability of a token is not the one that it was drawn with, and every ratio is wrong. Leave it out, "
                "or set sampling.only_eval to true."
            )
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.rollout.environment == "tools" and self.tools.is_empty:
            raise ValueError(
                "rollout.environment = tools, and tools.names, http and mcp are empty: the policy could call nothing. "
                f"Name some of {', '.join(BUNDLED_TOOLS)}, or set rollout.environment to single_turn."
            )
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        every, saved = self.eval.every_steps, self.learner.checkpoint_every_steps
        if self.eval.best is not None and (not saved or every % saved):
            raise ValueError(
                f"eval.best = {self.eval.best} keeps the best evaluation's checkpoint, but with eval.every_steps = "
                f"{every} and learner.checkpoint_every_steps = {saved} not every evaluated step has one. Set the first "
                "to a multiple of the second."
            )
        return self

    @model_validator(mode="after")
    def _check_filter(self) -> Self:
        settings, names = self.filter, [endpoint.name for endpoint in self.rewards.endpoints]
        if not settings.dynamic_sampling:
            return self
        if self.rollout.group_size < 2:
            raise ValueError(
                f"filter.dynamic_sampling judges a prompt by its group, and rollout.group_size = "
                f"{self.rollout.group_size}. Use at least 2 samples of a prompt, or turn the filter off."
            )
        if settings.score in ("reward", "environment"):
            return self
        if names and settings.score not in names:
            raise ValueError(
                f"filter.score = {settings.score} is none of rewards.endpoints ({', '.join(names)}). "
                "Use one of them, environment, or reward for the whole."
            )
        if self.rewards.combine == "shard":
            raise ValueError(
                f"filter.score = {settings.score}, but with rewards.combine = shard a sample has one endpoint's part "
                "only. Set filter.score to reward."
            )
        return self
