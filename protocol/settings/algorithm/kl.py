"""Settings of the KL divergence from the reference model."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from protocol.settings.section import Section


class KlSettings(Section):
    coefficient: NonNegativeFloat = Field(
        0.0, description="What the KL to the reference is multiplied with; 0: no reference is needed."
    )
    place: Literal["reward", "loss"] = Field(
        "loss", description="reward: taken off each token's reward; loss: added to the loss, by loss.aggregate."
    )
    form: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimate from one token, d = learner's less reference's logprob: d, d^2/2 or exp(-d) - 1 + d.",
    )
    target: PositiveFloat | None = Field(
        None, description="KL per token, in nats, that the coefficient is moved towards; null: it stays."
    )
    horizon: PositiveFloat = Field(
        10_000.0, description="Trajectories over which a KL 20 % off its target moves the coefficient by 20 %."
    )
