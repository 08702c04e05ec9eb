"""Settings of evaluations on held-out prompts."""

from pydantic import Field

from protocol.settings.section import Count, CountAboveZero, Section


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
