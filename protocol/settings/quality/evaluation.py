"""Settings of evaluations on held-out prompts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from protocol.settings.section import Count, CountAboveZero, Section

# The set that data.eval names.
MAIN_SET = "held_out"


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
        return self
