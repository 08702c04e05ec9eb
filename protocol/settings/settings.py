"""Every setting of a run, one section per room, with its unit, range and meaning.

Names follow the command line: `--learner.max_staleness 1`. Contradictions are refused before anything starts.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationInfo, model_validator

from protocol.settings.checks import OF_ROWS, check_combinations
from protocol.settings.data import DataSettings
from protocol.settings.evaluation import EvalSettings, FilterSettings, HealthSettings
from protocol.settings.learner import KlSettings, LearnerSettings, LossSettings, over_recipe
from protocol.settings.placement import PlacementSettings
from protocol.settings.policy import CriticSettings, PolicySection, ReferenceSettings
from protocol.settings.preference import DistillSettings, PreferenceSettings
from protocol.settings.rewards import RetrieverSettings, RewardsSettings
from protocol.settings.rollout import AgentsSettings, RolloutSettings, SamplingSettings
from protocol.settings.run import ReportSettings, RunSettings, WeightsSettings
from protocol.settings.section import Section
from protocol.settings.tools import ToolsSettings

# Key of the validation context: the combinations of a started run are not checked.
IS_SAVED = "is_saved"


class Settings(Section):
    """All settings of a run."""

    objective: Literal["policy_gradient", "sft", "dpo", "kto", "distill", "reward_model"] = Field(
        "policy_gradient",
        description="policy_gradient: RL. Without servers, on rows of data.train: sft, supervised fine-tuning or "
        "pretraining; dpo, DPO and its relatives on pairs of answers; kto, on single answers with a label; "
        "distill, a teacher's distributions on demonstrations; reward_model, a reward model from pairs.",
    )
    run: RunSettings = RunSettings()  # name, seed, length and folder
    policy: PolicySection = PolicySection()  # model, warm start and adapters
    data: DataSettings = DataSettings()  # files and order of prompts
    rollout: RolloutSettings = RolloutSettings()  # engines, episodes, budgets and time limits
    sampling: SamplingSettings = SamplingSettings()  # token sampling besides rollout.temperature
    tools: ToolsSettings = ToolsSettings()  # tools of the policy, for rollout.environment = tools
    agents: AgentsSettings = AgentsSettings()  # programs that use the servers' OpenAI address
    retriever: RetrieverSettings = RetrieverSettings()  # address and size of searches
    rewards: RewardsSettings = RewardsSettings()  # reward services, and how their parts become one reward
    learner: LearnerSettings = LearnerSettings()  # ranks, steps, staleness, optimizer, algorithm, checkpoints
    filter: FilterSettings = FilterSettings()  # groups replaced instead of trained
    loss: LossSettings = LossSettings()  # reduction of token losses
    kl: KlSettings = KlSettings()  # KL to a reference model
    critic: CriticSettings = CriticSettings()  # value model for advantages
    reference: ReferenceSettings = ReferenceSettings()  # model of the KL, of DPO and of KTO; the teacher
    preference: PreferenceSettings = PreferenceSettings()  # loss of compared answers: dpo, kto, reward_model
    distill: DistillSettings = DistillSettings()  # divergence from a teacher, for objective = distill
    weights: WeightsSettings = WeightsSettings()  # transport and checks of weight pushes
    placement: PlacementSettings = PlacementSettings()  # nodes and GPUs of ranks and servers
    eval: EvalSettings = EvalSettings()  # held-out scores while training
    health: HealthSettings = HealthSettings()  # bounds of metrics, with an alarm or the run's end
    report: ReportSettings = ReportSettings()  # records for people

    @property
    def is_of_rows(self) -> bool:
        """Return whether the run learns from the rows of data.train, without generating or scoring."""
        return self.objective in OF_ROWS

    def given_settings(self) -> dict[str, Any]:
        """Return the settings of the file and the command line, without the recipe's and defaults."""
        return self.model_dump(mode="json", exclude_unset=True)

    @model_validator(mode="wrap")
    @classmethod
    def _lay_over_recipe(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the recipe and missing sections, which are then validated; `model_fields_set` keeps the given fields."""
        if not isinstance(given, Mapping):
            return handler(given)
        laid, added = over_recipe(given)
        for section, below in OF_ROWS.get(str(given.get("objective")), {}).items():
            if isinstance(laid.get(section, {}), Mapping):
                laid[section] = below | laid.get(section, {})
        settings = handler({name: {} for name in cls.model_fields if name != "objective"} | laid)
        for section, names in added.items():
            getattr(settings, section).model_fields_set.difference_update(names)
        settings.model_fields_set.intersection_update(given)
        return settings

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        if not (info.context or {}).get(IS_SAVED):
            check_combinations(self)
        return self
