"""Settings of learning from compared answers, objective = dpo, kto and reward_model, and from a teacher, distill."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from protocol.settings.section import Section


class PreferenceSettings(Section):
    """The loss of compared answers: learner/objectives/preference.py, kto.py, reward_model.py have formulas."""

    loss: Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo"] = Field(
        "sigmoid", description="sigmoid: DPO, with preference.label_smoothing cDPO. simpo and orpo have no reference."
    )
    beta: PositiveFloat = Field(0.1, description="Strength of the comparison: larger keeps closer to the reference.")
    label_smoothing: float = Field(
        0.0, ge=0.0, lt=0.5, description="sigmoid, robust: share of pairs whose answers are the wrong way round."
    )
    average: bool = Field(
        False, description="Mean logprob of an answer's tokens instead of their sum; simpo and orpo always have means."
    )
    gamma: NonNegativeFloat = Field(0.5, description="simpo: margin by which the chosen answer is to be better.")
    nll_coefficient: NonNegativeFloat | None = Field(
        None, description="Weight of the chosen answer's mean negative logprob; null: 1 for orpo, 0 for others."
    )

    desirable_weight: PositiveFloat = Field(1.0, description="kto: weight of answers whose label is true.")
    undesirable_weight: PositiveFloat = Field(1.0, description="kto: weight of answers whose label is false.")
    center_coefficient: NonNegativeFloat = Field(
        0.0, description="reward_model: weight of the square of a pair's summed rewards, which centers them; 0.01."
    )

    @property
    def has_reference(self) -> bool:
        """Return whether logprobs are compared with those of a reference model."""
        return self.loss not in ("simpo", "orpo")


class DistillSettings(Section):
    """The divergence from the teacher, which is reference.model: learner/objectives/distill.py has the formula."""

    beta: float = Field(
        0.5, ge=0.0, le=1.0, description="0: KL(teacher, student); 1: KL(student, teacher); between: Jensen-Shannon."
    )
    temperature: PositiveFloat = Field(1.0, description="Temperature of both distributions.")
    nll_coefficient: NonNegativeFloat = Field(0.0, description="Weight of the rows' own mean negative logprob.")
