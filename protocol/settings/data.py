"""Settings of the data sets."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, model_validator
from pydantic_settings import NoDecode

from protocol.prompt_template import parse_template
from protocol.settings.paths import HUB_PREFIX, DataPath
from protocol.settings.section import CountAboveZero, Fraction, Section


def _checked_template(text: Any) -> Any:
    if isinstance(text, str):
        parse_template(text)
    return text


Template = Annotated[str, BeforeValidator(_checked_template)]


class DataEntry(Section):
    """An entry of a list of data sets with more than a path."""

    path: DataPath = Field(min_length=1, description="A file, a pattern, a folder or a name on the Hugging Face hub.")
    weight: float | None = Field(
        None,
        gt=0.0,
        le=1e6,
        description="Share of prompts, relative to the other weights; all entries have one, or none.",
    )
    prompt_key: str | None = Field(None, description="Column of the prompts; null: data.prompt_key.")
    label_key: str | None = Field(None, description="Column of the labels; null: data.label_key.")
    template: Template | None = Field(None, description="Template of the prompts; null: data.template.")
    max_prompts: CountAboveZero | None = Field(None, description="Usable rows, from the first; null: all.")


def _read_entries(given: Any, info: ValidationInfo) -> Any:
    """Return the data sets of a settings file or a command line: text, or a list of texts and entries.

    The command line's text is a JSON list if it begins with `[`.
    """
    if given == "null" or given == [None]:  # from the command line
        return None
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f'is a list but not JSON ({error}). Write \'["a.jsonl", "b.jsonl"]\'') from None
    if isinstance(given, dict):
        raise ValueError("is a map. Put it into a list: [{path: a.jsonl, weight: 1}]")
    return (
        [_read_entry(number, one, info.context) for number, one in enumerate(given, 1)]
        if isinstance(given, list)
        else given
    )


def _read_entry(number: int, given: Any, context: Any) -> Any:
    if isinstance(given, str | DataEntry):
        return given
    if not isinstance(given, dict):
        raise ValueError(f"entry {number} is {given!r}, expected a path, or a map with path, weight and others")
    if unknown := sorted(str(key) for key in given if key not in DataEntry.model_fields):
        known = ", ".join(DataEntry.model_fields)
        raise ValueError(f"entry {number} has {unknown[0]!r}, which does not exist. Expected some of {known}")
    try:
        return DataEntry.model_validate(given, context=context)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise ValueError(f"entry {number} has {field} = {problem['input']!r}: {message}") from None


# NoDecode: the command line's parser would split a path at its commas.
DataSets = Annotated[DataPath | list[DataPath | DataEntry], NoDecode, BeforeValidator(_read_entries)]
MaybeDataSets = Annotated[DataPath | list[DataPath | DataEntry] | None, NoDecode, BeforeValidator(_read_entries)]


def entries_of(given: str | Sequence[str | DataEntry] | None) -> list[DataEntry]:
    """Return the data sets of a setting as entries; [] for an empty setting."""
    listed = [given] if isinstance(given, str) else given or []
    return [DataEntry(path=one) if isinstance(one, str) else one for one in listed if one]


def in_words(given: str | Sequence[str | DataEntry] | None) -> str:
    """Return a setting of data sets for an error message: the first entry and the number of others."""
    entries = entries_of(given)
    others = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    return f"{entries[0].path if entries else 'null'}{others}"


class CurriculumSettings(Section):
    """Prompts that are drawn less often, by their group's mean of filter.score."""

    easy: float | None = Field(
        None, allow_inf_nan=False, description="Prompts with this mean score or more are easy; null: none."
    )
    hard: float | None = Field(
        None, allow_inf_nan=False, description="Prompts with this mean score or less are hard; null: none."
    )
    every: int = Field(
        4, ge=2, le=1000, description="Epochs between draws of an easy or hard prompt. Others are drawn in each epoch."
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.easy is not None and self.hard is not None and self.hard >= self.easy:
            raise ValueError(f"hard = {self.hard:g} is not below easy = {self.easy:g}: every prompt would be both")
        return self

    @property
    def is_on(self) -> bool:
        return self.easy is not None or self.hard is not None


class DataSettings(Section):
    train: DataSets = Field(
        "",
        description="Training prompts: a JSONL or Parquet file, a pattern (rows/*.parquet), a folder, "
        "hf:OWNER/NAME[/CONFIG][@REVISION][:SPLIT], or a list of these and of maps with path, weight, prompt_key, "
        "label_key, template, max_prompts.",
    )
    eval: MaybeDataSets = Field(None, description="Held-out prompts, in the forms of data.train; null: no evaluation.")
    form: Literal["prompts", "demonstrations", "preferences", "unpaired", "reward_pairs"] = Field(
        "prompts", description="Rows of data.train; objectives on rows set theirs (docs/do/fine_tune.md)."
    )
    prompt_key: str = Field("prompt", description="Column of the prompt (string or chat messages).")
    label_key: str = Field("label", description="Column of the label, which reward services receive.")
    label_required: bool = Field(True, description="Refuse rows without a label.")
    template: Template | None = Field(
        None, description="Text of the prompt, with {column} for the row's value; {} is data.prompt_key's column."
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="System message for prompts without one; it makes text a chat."
    )
    apply_chat_template: bool | None = Field(
        None,
        description="null: for messages, not for text; true: text is a user's message; false: join messages' texts.",
    )
    shuffle: bool = Field(True, description="A new order in each epoch, from run.seed; false: the order of the files.")
    max_prompts: CountAboveZero | None = Field(
        None, description="Usable rows of data.train in total, from the first; null: all."
    )
    max_prompt_tokens: CountAboveZero | None = Field(
        None, description="Longest training prompt; null: rollout.max_context_tokens less the answer."
    )
    overlong: Literal["skip", "refuse"] = Field(
        "skip",
        description="Longer training prompts. skip: skipped and counted; refuse: the run does not start.",
    )
    max_skipped_share: Fraction = Field(
        0.05,
        description="Largest share of data.train's rows that may be skipped as too long for the context or not "
        "renderable. Rows longer than data.max_prompt_tokens do not count.",
    )
    curriculum: CurriculumSettings = CurriculumSettings()  # prompts that are drawn less often

    @model_validator(mode="after")
    def _check_entries(self) -> Self:
        weighted = [entry.weight is not None for entry in entries_of(self.train)]
        if any(weighted) and not all(weighted):
            raise ValueError("data.train has entries with and without a weight. Give every one a weight, or none")
        if any(weighted) and self.max_prompts is not None:
            raise ValueError(
                f"data.max_prompts = {self.max_prompts} does not say which of data.train's weighted entries it "
                "limits. Give each entry its own max_prompts"
            )
        if any(entry.weight is not None for entry in entries_of(self.eval)):
            raise ValueError("data.eval has an entry with a weight, but held-out prompts are read in order. Remove it")
        for entry in entries_of(self.eval):
            if entry.path.startswith(HUB_PREFIX) and ":" not in entry.path.removeprefix(HUB_PREFIX):
                raise ValueError(
                    f"data.eval = {entry.path} names no split, and train is the default. Add :test or another"
                )
        if self.apply_chat_template is False and self.system_prompt is not None:
            raise ValueError("data.system_prompt makes a chat, and data.apply_chat_template = false forbids it")
        return self

    def of_held_out(self) -> Self:
        """Return the section for held-out sets: eval.num_prompts limits them, not max_prompts."""
        return self.model_copy(update={"max_prompts": None})

    def weights(self) -> list[float] | None:
        """Return the weight of each entry of data.train; None without weights: all rows are one list."""
        entries = entries_of(self.train)
        weights = [entry.weight for entry in entries if entry.weight is not None]
        return weights if weights and len(weights) == len(entries) else None
