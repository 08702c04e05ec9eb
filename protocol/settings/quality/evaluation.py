"""Settings of evaluations on held-out prompts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from protocol.settings.section import Count, CountAboveZero, Section

# The set that data.eval names.
MAIN_SET = "held_out"
# Its means, under names of their own.
_OF_MAIN_SET = ("eval_reward", "eval_reward_greedy")


class EvalSet(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=60, description="Part of its metrics: eval/NAME/reward.")
    data: str = Field(min_length=1, description="JSONL or Parquet of held-out prompts, with data.eval's columns.")
    num_prompts: CountAboveZero | None = Field(None, description="The first so many; null: eval.num_prompts.")
    samples: CountAboveZero | None = Field(None, le=4095, description="Samples of a prompt; null: eval.samples.")
    temperature: float | None = Field(None, ge=1e-6, le=1e6, description="Of these samples; null: rollout.temperature.")


class EvalSettings(Section):
    every_steps: Count = Field(
        0, description="Steps between evaluations; 0: none. With any, also before the first and after the last step."
    )
    num_prompts: CountAboveZero = Field(
        256, description="Held-out prompts of one evaluation (the first ones of data.eval)."
    )
    samples: CountAboveZero = Field(
        1, le=4095, description="Samples of a prompt at rollout.temperature; one greedy sample is added."
    )
    sets: list[EvalSet] = Field(
        [], max_length=32, description="Sets beside data.eval: name, data, num_prompts, samples, temperature."
    )
    solved_at: float = Field(1.0, description="pass@k: a sample of this reward or more has solved its prompt.")
    pin: bool = Field(
        False, description="No step begins during an evaluation: all its answers are of one policy version."
    )
    best: str | None = Field(
        None, pattern=r"^eval[_/]", description="Metric by which the best checkpoint is kept, such as eval_reward."
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which value of eval.best is the best.")

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        names = [MAIN_SET, *(one.name for one in self.sets)]
        if len(set(names)) < len(names):
            raise ValueError(
                f"eval.sets has the names {names[1:]}, and data.eval is {MAIN_SET}. Give each set a name of its own."
            )
        if self.best is not None and not self.every_steps:
            raise ValueError(f"eval.best = {self.best} needs evaluations. Set eval.every_steps, or eval.best to null.")
        if self.best is not None and self.best not in _OF_MAIN_SET and not self._is_measured(self.best):
            raise ValueError(
                f"eval.best = {self.best} is measured by no evaluation of this run. Expected "
                f"{' or '.join(_OF_MAIN_SET)}, or eval/SET/FIGURE: SET one of {', '.join(names)}, FIGURE reward, "
                "greedy, SOURCE/reward, majority@n, or pass@k of k = 1, 2, 4 .. and n, for n samples of a prompt."
            )
        return self

    def _is_measured(self, metric: str) -> bool:
        """Return whether evaluations have this figure of one set; which data sources a set has is not known here."""
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
