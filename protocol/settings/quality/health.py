"""Settings of a run's health: from which figures on it is sick, who is told, and whether it ends."""

from pydantic import Field, PositiveFloat

from protocol.settings.section import Count, CountAboveZero, Fraction, Section


class HealthSettings(Section):
    alarms: bool = Field(True, description="Tell in words what is out of bounds: terminal, metrics, report, W&B.")
    patience: CountAboveZero = Field(3, description="An alarm begins after so many steps in a row out of bounds.")
    stop_after: Count = Field(
        0, description="The run ends, with its last checkpoint, after so many steps in a row out of bounds; 0: never."
    )
    ratio_low: PositiveFloat = Field(0.8, description="Alarm when ratio_mean is below.")
    ratio_high: PositiveFloat = Field(1.25, description="Alarm when ratio_mean is above.")
    kl_fresh: PositiveFloat = Field(0.05, description="Alarm when kl_fresh is above, nats per token.")
    kl_stale: PositiveFloat = Field(0.5, description="Alarm when kl_stale is above, nats per token.")
    effective_samples: Fraction = Field(0.3, description="Alarm when effective_sample_share is below.")
    clip_fraction: Fraction = Field(0.4, description="Alarm when clip_fraction is above.")
    entropy: float = Field(0.01, description="Alarm when entropy is below, nats per token.")
    grad_norm: PositiveFloat = Field(1000.0, description="Alarm when grad_norm is above.")
    equal_groups: Fraction = Field(0.9, description="Alarm when the share of groups with equal rewards is above.")
    truncated: Fraction = Field(0.5, description="Alarm when the share of samples that were cut off is above.")
    length_ratio: PositiveFloat = Field(
        3.0, description="Alarm when samples of above-average reward are so many times as long as the others."
    )
