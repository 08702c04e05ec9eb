"""How a row of one data set becomes a prompt: which columns, which template, text or chat."""

from dataclasses import dataclass
from typing import Any

from protocol.errors import SettingsError
from protocol.message_texts import ContentError, with_texts
from protocol.prompt_template import Part, parse_template
from protocol.settings.data import DataEntry, DataSettings


@dataclass(frozen=True)
class PromptShape:
    """What the settings say of the rows of one entry."""

    prompt_key: str  # column of the prompt
    label_key: str  # column of the label
    label_required: bool  # a row without one is refused
    template: tuple[Part, ...]  # the prompt's text; empty: the prompt's column as it is
    system_prompt: str | None  # first message of prompts that have none of this role
    is_chat: bool | None  # True: text becomes a message; False: messages become text; None: as they are

    def apply(self, content: dict[str, Any], where: str) -> Any:
        """Return a row's prompt, or whatever stands in its place. where: names the row, for errors.

        Raises: SettingsError for a row without a column that the template names.
        """
        prompt = self._fill(content, where) if self.template else content.get(self.prompt_key)
        if (self.is_chat is None and self.system_prompt is None) or not is_prompt(prompt):
            return prompt
        if self.is_chat is False and isinstance(prompt, list):
            return "\n\n".join(str(message["content"] or "") for message in _with_texts(prompt, where))
        if isinstance(prompt, str) and (self.is_chat or self.system_prompt is not None):
            prompt = [{"role": "user", "content": prompt}]
        if self.system_prompt is None or not isinstance(prompt, list) or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": self.system_prompt}, *prompt]

    def _fill(self, content: dict[str, Any], where: str) -> str:
        return "".join(
            part.text + ("" if part.place is None else self._value(content, part.place, where))
            for part in self.template
        )

    def _value(self, content: dict[str, Any], place: tuple[str, ...], where: str) -> str:
        column, *inside = place
        value: Any = content
        for key in (column or self.prompt_key, *inside):
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise SettingsError(
                    f"data: {where} has no {key!r}, which the template names. Its columns are {sorted(content)}. "
                    "Change data.template, or fix the row."
                )
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise SettingsError(
                f"data: {where} has {value!r:.80} where the template wants text or a number. Change data.template, or "
                "fix the row."
            )
        return str(value)


def _with_texts(prompt: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    try:
        return with_texts(prompt)
    except ContentError as error:
        raise SettingsError(f"data: {where}: {error}. Fix the row.") from None


def shape_of(data: DataSettings, entry: DataEntry) -> PromptShape:
    """Return what an entry says of its rows, and the data section where it does not."""
    template = entry.template if entry.template is not None else data.template
    return PromptShape(
        prompt_key=entry.prompt_key or data.prompt_key,
        label_key=entry.label_key or data.label_key,
        label_required=data.label_required,
        template=tuple(parse_template(template)) if template is not None else (),
        system_prompt=data.system_prompt,
        is_chat=data.apply_chat_template,
    )


def is_prompt(prompt: Any) -> bool:
    """Return whether this is text, or a list of chat messages with role and content."""
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(turn, dict) and "role" in turn and "content" in turn for turn in prompt)
