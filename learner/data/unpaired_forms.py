"""The forms of single answers with a label, recognised by their columns: read and checked without a tokenizer.

A row is a demonstration (`sft_forms.py`) with one of these columns, true or false or 1 or 0:

label      TRL, ms-swift, OpenRLHF
kto_tag    LLaMA-Factory

The answer is the completion, or the last message of a conversation.
"""

from typing import Any

from learner.data.sft_forms import BadRowError, Chat, Completion, Content, Tokens, recognise

_LABELS = ("label", "kto_tag")
_PAIRS = ("chosen", "rejected", "rejected_response", "rejected_messages")


def recognise_unpaired(row: dict[str, Any]) -> tuple[str, Content, bool]:
    """Return a row's form, in words, its answer, and whether it is desirable. Raises: BadRowError."""
    if pair := [key for key in _PAIRS if row.get(key) is not None]:
        raise BadRowError(f"has the column {pair[0]!r} of a pair of answers, which objective = dpo learns from")
    keys = [key for key in _LABELS if row.get(key) is not None]
    if len(keys) != 1:
        raise BadRowError(f"has the keys {sorted(row)}, expected one of label and kto_tag, true or false")
    label = row[keys[0]]
    if label not in (True, False):
        raise BadRowError(f"{keys[0]} is {label!r}, expected true or false")
    form, content = recognise({key: each for key, each in row.items() if key != keys[0]})
    form, is_desirable = f"{form} + {keys[0]} {'true' if label else 'false'}", bool(label)
    if isinstance(content, Chat):
        return form, _last_alone(content), is_desirable
    is_of_tokens = isinstance(content, Tokens) and not content.weights[0]
    if not is_of_tokens and not (isinstance(content, Completion) and content.prompt):
        raise BadRowError("does not say where the answer begins. Give prompt + completion, or messages")
    return form, content, is_desirable


def _last_alone(content: Chat) -> Chat:
    """Return the conversation with its last message as the answer."""
    if not content.weights[-1]:
        raise BadRowError("does not end with a message of the role assistant that is learnt")
    return content._replace(weights=[0.0] * (len(content.weights) - 1) + content.weights[-1:])
