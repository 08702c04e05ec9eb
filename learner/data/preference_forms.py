"""The forms of judged answers, pairs and single ones, recognised by their columns: checked without a tokenizer.

columns of a pair                                          the prompt
prompt, chosen, rejected: text or messages                 prompt
chosen, rejected: whole conversations                      the messages with which both begin
conversations, chosen, rejected: one message each          conversations
instruction, chosen, rejected [input, system, history]     instruction and input
messages, rejected_response                                all but the last message, which is the chosen one
chosen, rejected: input_ids and a mask each                tokens before the first learnt one

A single answer is a demonstration (`sft_forms.py`) with one of these columns, true or false or 1 or 0. The answer is
the completion, or the last message of a conversation.

label      TRL, ms-swift, OpenRLHF
kto_tag    LLaMA-Factory
"""

from typing import Any

from learner.data.sft_forms import BadRowError, Chat, Completion, Content, Tokens, recognise, refuse_unread

_ANSWERS = ("chosen", "rejected")
_LAST_MESSAGE = "messages + rejected_response"
_LABELS = ("label", "kto_tag")
_PAIRS = ("chosen", "rejected", "rejected_response", "rejected_messages")


def recognise_pair(row: dict[str, Any]) -> tuple[str, list[Content]]:
    """Return a row's form, in words, and the contents of its chosen and rejected answer. Raises: BadRowError."""
    row = {key: each for key, each in row.items() if each is not None}
    if "messages" in row and "rejected_response" in row:
        form, rows = _LAST_MESSAGE, _of_last_message(row)
    elif all(key in row for key in _ANSWERS):
        form, rows = _of_columns(row)
    else:
        raise BadRowError(f"has the keys {sorted(row)}, expected chosen + rejected, or {_LAST_MESSAGE}")
    read = ("system",) if "conversations" in row else ("system", "history") if "instruction" in row else ()
    refuse_unread(row, ("prompt", *read))
    if rows[0] == rows[1]:
        raise BadRowError("has equal answers in chosen and rejected: they say nothing about each other")
    return form, [recognise(each)[1] for each in rows]


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


def _of_columns(row: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the form, and the row as two demonstrations: prompt and completion, or tokens."""
    if all(isinstance(row[key], dict) and "input_ids" in row[key] for key in _ANSWERS):
        return "input_ids in chosen + rejected", [row[key] for key in _ANSWERS]
    answers = [[each] if isinstance(each, dict) else each for each in (row[key] for key in _ANSWERS)]
    tools = {"tools": row["tools"]} if "tools" in row else {}
    if all(_is_conversation(answer) for answer in answers):
        prompt, answers = _split(*answers)
        _check_within(row.get("prompt"), prompt)
        return "whole conversations in chosen + rejected", [
            {"prompt": prompt, "completion": each, **tools} for each in answers
        ]
    if "conversations" in row:
        asked = _as_list(row["conversations"])
        prompts = [recognise({**_rest(row), "conversations": asked + _as_list(answer)}) for answer in answers]
        return "conversations + chosen + rejected", _last_learnt(prompts, tools)
    if "instruction" in row:
        prompts = [recognise({**_rest(row), "output": answer}) for answer in answers]
        return "instruction + chosen + rejected", _last_learnt(prompts, tools)
    if "prompt" not in row:
        raise BadRowError("has chosen and rejected as text without a prompt. Add the column prompt")
    if (asked := row["prompt"]) and all(isinstance(each, str) and each.startswith(str(asked)) for each in answers):
        raise BadRowError("has chosen and rejected that both begin with the prompt. Remove it from them")
    return "prompt + chosen + rejected", [{"prompt": row["prompt"], "completion": each, **tools} for each in answers]


def _of_last_message(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = _as_list(row["messages"])
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if last.get("role") != "assistant":
        raise BadRowError("messages does not end with the assistant's chosen answer")
    tools = {"tools": row["tools"]} if "tools" in row else {}
    rejected = {"role": "assistant", "content": row["rejected_response"]}
    return [{"prompt": messages[:-1], "completion": [each], **tools} for each in (last, rejected)]


def _last_learnt(found: list[tuple[str, Content]], tools: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversations with their last message as the completion, of which alone something is learnt."""
    chats = [content.messages for _, content in found if isinstance(content, Chat)]
    return [{"prompt": chat[:-1], "completion": chat[-1:], **tools} for chat in chats]


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in row.items() if key not in _ANSWERS}


def _is_conversation(answer: Any) -> bool:
    """Return whether the messages begin before the answer: with a system's or a user's one."""
    is_list = isinstance(answer, list) and bool(answer) and isinstance(answer[0], dict)
    return is_list and answer[0].get("role") in ("system", "user")


def _split(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """Return the messages with which both begin, and the rest of each."""
    pairs = zip(chosen, rejected, strict=False)
    num = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    if num == 0:
        raise BadRowError("has conversations in chosen and rejected that do not begin with the same message")
    if num in (len(chosen), len(rejected)):
        raise BadRowError("has a conversation in chosen or rejected that the other one continues")
    return chosen[:num], [chosen[num:], rejected[num:]]


def _check_within(given: Any, messages: list[Any]) -> None:
    """Raise BadRowError unless a prompt in a column of its own is a part of the conversations."""
    texts = [each.get("content") for each in messages]
    asked = [each.get("content") for each in given if isinstance(each, dict)] if isinstance(given, list) else [given]
    if left_out := [text for text in asked if text and not any(str(text).strip() in str(each) for each in texts)]:
        raise BadRowError(
            f"has {str(left_out[0])[:80]!r} in prompt, and the conversations in chosen and rejected do not begin with "
            "it. Put it into both, or remove the column"
        )


def _as_list(messages: Any) -> list[Any]:
    if not isinstance(messages, list):
        raise BadRowError(f"has {str(messages)[:80]!r}, expected a list of messages")
    return messages


def _last_alone(content: Chat) -> Chat:
    """Return the conversation with its last message as the answer."""
    if not content.weights[-1]:
        raise BadRowError("does not end with a message of the role assistant that is learnt")
    return content._replace(weights=[0.0] * (len(content.weights) - 1) + content.weights[-1:])
