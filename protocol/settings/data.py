"""Settings of the data sets."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import NoDecode

from protocol.prompt_template import parse_template
from protocol.settings.section import CountAboveZero, Fraction, Section

# What a name on the Hugging Face hub begins with, where paths are named.
HUB_PREFIX = "hf:"


def _checked_template(text: Any) -> Any:
    if isinstance(text, str):
        parse_template(text)
    return text


Template = Annotated[str, BeforeValidator(_checked_template)]


class DataEntry(Section):
    """One entry of a list of data sets that says more than where its rows lie."""

    path: str = Field(min_length=1, description="A file, a pattern, a folder or a name on the Hugging Face hub.")
    weight: float | None = Field(
        None, gt=0.0, le=1e6, description="Of every hundred prompts, its share by weight; all entries have one or none."
    )
    prompt_key: str | None = Field(None, description="Column of its prompts; null: data.prompt_key.")
    label_key: str | None = Field(None, description="Column of its labels; null: data.label_key.")
    template: Template | None = Field(None, description="Template of its prompts; null: data.template.")
    max_prompts: CountAboveZero | None = Field(None, description="Its first so many usable rows; null: all.")


def _read_entries(given: Any) -> Any:
    """Return what a settings file or a command line names as data sets: text, or a list of texts and entries.

    The command line's text is a list when it begins as one. Raises: ValueError in the words of a settings file.
    """
    if given == "null" or given == [None]:  # the command line's
        return None
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f'begins as a list and is no JSON ({error}). Write \'["a.jsonl", "b.jsonl"]\'') from None
    if isinstance(given, dict):
        raise ValueError("is a map. Put it into a list: [{path: a.jsonl, weight: 1}]")
    return [_read_entry(number, one) for number, one in enumerate(given, 1)] if isinstance(given, list) else given


def _read_entry(number: int, given: Any) -> Any:
    if isinstance(given, str | DataEntry):
        return given
    if not isinstance(given, dict):
        raise ValueError(f"entry {number} is {given!r}, expected a path, or a map with path, weight and others")
    if unknown := sorted(str(key) for key in given if key not in DataEntry.model_fields):
        known = ", ".join(DataEntry.model_fields)
        raise ValueError(f"entry {number} has {unknown[0]!r}, which does not exist. Expected some of {known}")
    try:
        return DataEntry.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise ValueError(f"entry {number} has {field} = {problem['input']!r}: {message}") from None


# Not decoded by the command line's reader: it would part a path at its commas.
DataSets = Annotated[str | list[str | DataEntry], NoDecode, BeforeValidator(_read_entries)]
MaybeDataSets = Annotated[str | list[str | DataEntry] | None, NoDecode, BeforeValidator(_read_entries)]


def entries_of(given: str | Sequence[str | DataEntry] | None) -> list[DataEntry]:
    """Return what a setting names as data sets, each as an entry; none for a setting that is not set."""
    listed = [given] if isinstance(given, str) else given or []
    return [DataEntry(path=one) if isinstance(one, str) else one for one in listed if one]


def in_words(given: str | Sequence[str | DataEntry] | None) -> str:
    """Return a setting of data sets as an error message names it: its first entry, and how many others there are."""
    entries = entries_of(given)
    others = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
    return f"{entries[0].path if entries else 'null'}{others}"


class CurriculumSettings(Section):
    """What is easy or hard by filter.score, the mean over a group's samples."""

    easy: float | None = Field(
        None, allow_inf_nan=False, description="A prompt whose mean score was so much or more is easy; null: none is."
    )
    hard: float | None = Field(
        None, allow_inf_nan=False, description="A prompt whose mean score was so much or less is hard; null: none is."
    )
    every: int = Field(
        4, ge=2, le=1000, description="Epochs from one draw of an easy or hard prompt to the next. Others: each epoch."
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
    eval: MaybeDataSets = Field(
        None, description="Held-out prompts, named as data.train names its own; null: no evaluation."
    )
    prompt_key: str = Field("prompt", description="Column that holds the prompt (string or chat messages).")
    label_key: str = Field("label", description="Column that holds the label handed to the reward services.")
    label_required: bool = Field(True, description="Refuse rows without a label.")
    template: Template | None = Field(
        None, description="Text of the prompt, with {column} for a row's own; {} is data.prompt_key's column."
    )
    system_prompt: str | None = Field(
        None, min_length=1, description="System message before prompts that have none; it makes text a chat."
    )
    apply_chat_template: bool | None = Field(
        None,
        description="null: of messages, not of text. true: text is a user's message. false: messages are their texts.",
    )
    shuffle: bool = Field(True, description="Each epoch in an order of its own, from run.seed; false: as they lie.")
    max_prompts: CountAboveZero | None = Field(None, description="The first so many usable rows in all; null: all.")
    max_prompt_tokens: CountAboveZero | None = Field(
        None, description="Longest training prompt; null: what rollout.max_context_tokens leaves for one."
    )
    overlong: Literal["skip", "refuse"] = Field(
        "skip", description="Training prompts that are longer: left out, told and counted, or the run is refused."
    )
    max_skipped_share: Fraction = Field(
        0.05,
        description="Largest share of data.train's rows that is left out because too long for the context or not "
        "renderable. Those longer than data.max_prompt_tokens do not count.",
    )
    curriculum: CurriculumSettings = CurriculumSettings()  # prompts that are drawn less often, by their mean score

    @model_validator(mode="after")
    def _check_entries(self) -> Self:
        weighted = [entry.weight is not None for entry in entries_of(self.train)]
        if any(weighted) and not all(weighted):
            raise ValueError("data.train has entries with and without a weight. Give every one a weight, or none")
        if any(weighted) and self.max_prompts is not None:
            raise ValueError(
                f"data.max_prompts = {self.max_prompts} says not which of data.train's weighted entries it cuts. "
                "Give each entry max_prompts of its own"
            )
        if any(entry.weight is not None for entry in entries_of(self.eval)):
            raise ValueError("data.eval has an entry with a weight: held-out prompts are taken in order. Leave it out")
        for entry in entries_of(self.eval):
            if entry.path.startswith(HUB_PREFIX) and ":" not in entry.path.removeprefix(HUB_PREFIX):
                raise ValueError(f"data.eval = {entry.path} names no split, which would be train. Add :test or another")
        if self.apply_chat_template is False and self.system_prompt is not None:
            raise ValueError("data.system_prompt makes a chat, and data.apply_chat_template = false wants none")
        return self

    def weights(self) -> list[float] | None:
        """Return the weight of each entry of data.train; None where they are not weighted: all rows are one list."""
        entries = entries_of(self.train)
        weights = [entry.weight for entry in entries if entry.weight is not None]
        return weights if weights and len(weights) == len(entries) else None
