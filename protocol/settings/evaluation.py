"""Settings of evaluations, of the filter on groups, and of the run's health."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from protocol.settings.paths import DataPath, FilePath
from protocol.settings.section import Count, CountAboveZero, Fraction, Section

# Name of the set in data.eval.
MAIN_SET = "held_out"


class EvalSet(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=60, description="Name in the metrics: eval/NAME/reward.")
    data: DataPath = Field(min_length=1, description="JSONL or Parquet of held-out prompts, with data.eval's columns.")
    num_prompts: CountAboveZero | None = Field(None, description="Prompts, from the first; null: eval.num_prompts.")
    samples: CountAboveZero | None = Field(None, le=4095, description="Samples of a prompt; null: eval.samples.")
    temperature: float | None = Field(None, ge=0.01, le=1e6, description="Temperature; null: rollout.temperature.")


class EvalSettings(Section):
    every_steps: Count = Field(
        0, description="Steps between evaluations, which also run before the first and after the last step; 0: never."
    )
    before: bool = Field(True, description="Evaluate before the first step.")
    num_prompts: CountAboveZero = Field(256, description="Prompts of one evaluation: the first ones of data.eval.")
    samples: CountAboveZero = Field(
        1, le=4095, description="Samples of a prompt at rollout.temperature, in addition to one greedy sample."
    )
    sets: list[EvalSet] = Field(
        [], max_length=32, description="Further sets: name, data, num_prompts, samples, temperature."
    )
    solved_at: float = Field(1.0, description="pass@k: smallest reward of a sample that solves its prompt.")
    answers: FilePath | None = Field(
        None,
        description="File that gets a JSON line for each prompt of data.eval with its eval.samples samples, in place "
        "of scores and greedy samples. Its rows are not sampled again. sluice generate sets it.",
    )
    pin: bool = Field(
        False, description="Steps wait for a running evaluation, so that one policy version gives all its answers."
    )
    best: str | None = Field(
        None, pattern=r"^eval/", description="Metric of the best checkpoint, which is kept: eval/SET/FIGURE."
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Best value of eval.best.")

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        names = [MAIN_SET, *(one.name for one in self.sets)]
        if len(set(names)) < len(names):
            raise ValueError(
                f"eval.sets has the names {names[1:]}, and data.eval is {MAIN_SET}. Give each set a name of its own."
            )
        if self.best is not None and not self.every_steps:
            raise ValueError(f"eval.best = {self.best} needs evaluations. Set eval.every_steps, or eval.best to null.")
        if self.best is not None and not self._is_measured(self.best):
            raise ValueError(
                f"eval.best = {self.best} is not a metric of this run's evaluations. Expected eval/SET/FIGURE: "
                f"SET one of {', '.join(names)}, FIGURE reward, greedy, SOURCE/reward, majority@n, or pass@k of "
                "k = 1, 2, 4 .. and n, for n samples of a prompt."
            )
        return self

    def _is_measured(self, metric: str) -> bool:
        """Return whether evaluations have this metric of a set. The data sources of a set are not known here."""
        samples = {MAIN_SET: self.samples} | {one.name: one.samples or self.samples for one in self.sets}
        _, _, of_set = metric.partition("/")
        name, _, figure = of_set.partition("/")
        if name not in samples:
            return False
        number = samples[name]
        ks = {2**i for i in range(number.bit_length())} | {number}
        known = {"reward", "greedy", *(f"pass@{k}" for k in ks), *([f"majority@{number}"] if number > 1 else [])}
        source, _, of_source = figure.rpartition("/")
        return figure in known or bool(source and of_source == "reward")


class FilterSettings(Section):
    dynamic_sampling: bool = Field(
        False,
        description="Train only groups with low < mean score < high; the next prompts replace the others.",
    )
    low: float = Field(0.0, description="Groups with this mean score or less are filtered as too hard.")
    high: float = Field(1.0, description="Groups with this mean score or more are filtered as too easy.")
    score: str = Field(
        "reward",
        min_length=1,
        max_length=200,
        description="reward: the `scores` of reward services or an environment's score if available, else the reward. "
        "Otherwise the name of an endpoint.",
    )
    max_replaced: Count = Field(
        20, description="Largest number of groups filtered before one step, in learner.groups_per_step; 0: no limit."
    )
    at_limit: Literal["stop", "keep"] = Field(
        "stop", description="stop: the run ends with the reason; keep: the step takes the next groups unfiltered."
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"filter.low = {self.low:g} and filter.high = {self.high:g} leave no score between them. "
                "Lower the first or raise the second."
            )
        return self


class HealthSettings(Section):
    alarms: bool = Field(True, description="Report metrics out of bounds: on the terminal, in metrics, report and W&B.")
    patience: CountAboveZero = Field(3, description="Consecutive steps out of bounds before an alarm.")
    stop_after: Count = Field(
        0, description="Consecutive steps out of bounds after which the run saves and ends; 0: never."
    )
    ratio_low: PositiveFloat = Field(0.8, description="Alarm when policy/ratio_mean is below.")
    ratio_high: PositiveFloat = Field(1.25, description="Alarm when policy/ratio_mean is above.")
    kl_fresh: PositiveFloat = Field(0.05, description="Alarm when policy/kl_fresh is above, nats per token.")
    kl_stale: PositiveFloat = Field(0.5, description="Alarm when policy/kl_stale is above, nats per token.")
    kl_stale_factor: PositiveFloat = Field(
        4.0, description="Alarm when policy/kl_stale is above its median over the last 50 steps by this factor."
    )
    effective_samples: Fraction = Field(0.3, description="Alarm when policy/effective_sample_share is below.")
    clip_fraction: Fraction = Field(0.4, description="Alarm when policy/clip_share is above.")
    entropy: float = Field(0.01, description="Alarm when policy/entropy is below, nats per token.")
    grad_norm: PositiveFloat = Field(1000.0, description="Alarm when policy/grad_norm is above.")
    equal_groups: Fraction = Field(0.9, description="Alarm when the share of groups with equal rewards is above.")
    truncated: Fraction = Field(0.5, description="Alarm when the share of samples that were cut off is above.")
    length_ratio: PositiveFloat = Field(
        3.0, description="Alarm when samples of above-average reward are longer than the others by this factor."
    )
