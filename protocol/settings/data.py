"""Settings of the data sets."""

from pydantic import Field

from protocol.settings.section import Fraction, Section


class DataSettings(Section):
    train: str = Field("", description="JSONL or Parquet of training prompts.")
    eval: str | None = Field(None, description="JSONL or Parquet of held-out prompts; null: no evaluation.")
    prompt_key: str = Field("prompt", description="Column that holds the prompt (string or chat messages).")
    label_key: str = Field("label", description="Column that holds the label handed to the reward services.")
    label_required: bool = Field(True, description="Refuse rows without a label.")
    max_skipped_share: Fraction = Field(
        0.05, description="Largest share of data.train's rows that is left out because too long or not renderable."
    )
