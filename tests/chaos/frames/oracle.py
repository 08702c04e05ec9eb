"""Whether frames are a message that the coordinator must take, judged a second time from the contract's words.

Shares nothing with `protocol.wire.codec`: another MessagePack library, plain loops instead of types and arrays. Used by
`tests.chaos.frame_fuzz`: where the two disagree, one of them is wrong.
"""

import math
import struct
from collections.abc import Callable
from typing import Any

import msgpack

Rule = Callable[[Any], bool]

RUN_ID, INCARNATION, SCHEMA = "r1", 1, 7


def _text(least: int, most: int) -> Rule:
    return lambda value: type(value) is str and least <= len(value) <= most


def _number(least: float = -math.inf, most: float = math.inf) -> Rule:
    return lambda value: type(value) in (int, float) and (math.isnan(value) or least <= value <= most)


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e11


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _count_or_none(value: Any) -> bool:
    return value is None or _count(value)


def _table(most: int, rule: Rule) -> Rule:
    return lambda value: (
        type(value) is dict and len(value) <= most and all(_name(k) and rule(v) for k, v in value.items())
    )


def _spans(value: Any) -> bool:
    return (
        type(value) is list
        and 1 <= len(value) <= 4096
        and all(type(span) is list and len(span) == 3 and all(map(_count, span)) for span in value)
    )


def _one_of(*values: Any) -> Rule:
    return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values)


def _rows(*rules: Rule) -> Rule:
    """Lists of at least four values, each by its rule; later ones may be left out."""
    return lambda value: (
        type(value) is list
        and len(value) <= 1024
        and all(
            type(row) is list
            and 4 <= len(row) <= len(rules)
            and all(rule(part) for rule, part in zip(rules, row, strict=False))
            for row in value
        )
    )


def _tokens(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**53


def _facts(value: Any) -> bool:
    given = {"reward_score": None, "reward_logs": {}, "calls": [], **value} if type(value) is dict else {}
    return _fits(given, _FACTS)


_name, _reason = _text(1, 200), _text(0, 2000)
_FACTS: dict[str, Rule] = {
    "group": _name,
    "sample_index": _count,
    "attempt": _count,
    "incarnation": _count,
    "kind": _one_of("train", "eval"),
    "is_greedy": _one_of(True, False),
    "server": _name,
    "num_tokens": _count,
    "num_prompt_tokens": _count,
    "num_turns": _count,
    "finish": _one_of("answer", "stop", "length", "turns", "context", "time"),
    "reward": _number(),
    "reward_parts": _table(64, _number()),
    "reward_score": lambda value: value is None or _number()(value),
    "reward_logs": _table(64, _number()),
    "version_spans": _spans,
    "started_at": _seconds,
    "finished_at": _seconds,
    "generate_s": _seconds,
    "environment_s": _seconds,
    "reward_s": _seconds,
    "calls": _rows(_one_of("turn", "environment", "tool", "reward"), _name, _seconds, _seconds, _count, _count, _count),
}
_STAMP: dict[str, Rule] = {
    "schema": _one_of(SCHEMA),
    "run_id": _one_of(RUN_ID),
    "incarnation": _one_of(INCARNATION),
    "request": _count,
}
_MESSAGES: dict[str, dict[str, Rule]] = {
    "hello": {"server": _name, "policy_version": _count_or_none},
    "demand": {
        "num_groups": _count,
        "policy_version": _count_or_none,
        "heard_of_lease": _count,
        "leases": _table(4096, _count),
    },
    "trajectory": {"facts": _facts},
    "failed": {
        "group": _name,
        "sample_index": _count,
        "attempt": _count,
        "boundary": _name,
        "detail": _reason,
        "num_model_tokens": _count,
    },
    "heartbeat": {
        "policy_version": _count_or_none,
        "num_groups": _count,
        "num_running": _count,
        "num_waiting": _count,
        "generated_tokens": _count,
        "failures": _table(256, _count),
    },
    "tokens": {
        "session": _name,
        "num_generated": _tokens,
        "rows": _rows(
            *(_name, _count, _count, _count, _tokens),
            *(_one_of("", "done", "failed", "stopped", "died"), _count, _count),
        ),
    },
    "next": {"step": _count, "rank": _count, "part": _count},
    "stepped": {
        "step": _count,
        "policy_version": _count,
        "is_applied": _one_of(True, False),
        "detail": _reason,
        "metrics": _table(1024, _number()),
    },
    "save_ledger": {"path": _text(0, 4096), "step": _count},
}

# What a peer may leave out, by message; `request` is left out by all that are no learner ranks.
_DEFAULTS: dict[str, dict[str, Any]] = {"failed": {"num_model_tokens": 0}, "next": {"part": 0}}


def is_valid(header: bytes, buffers: list[bytes]) -> bool:
    """Return whether a header with buffers, rightly sealed, is a message of this run to its coordinator."""
    try:
        message = msgpack.unpackb(header, strict_map_key=False)
    except (ValueError, RecursionError, TypeError, OverflowError):
        return False
    if type(message) is not dict or type(kind := message.pop("type", None)) is not str or kind not in _MESSAGES:
        return False
    if not _fits({"request": 0} | _DEFAULTS.get(kind, {}) | message, _STAMP | _MESSAGES[kind]):
        return False
    if kind == "trajectory":
        return len(buffers) == 3 and _is_trainable(message["facts"], *buffers)
    return not buffers


def _fits(values: dict[Any, Any], rules: dict[str, Rule]) -> bool:
    return values.keys() == rules.keys() and all(rule(values[key]) for key, rule in rules.items())


def _is_trainable(facts: dict[str, Any], tokens: bytes, logprobs: bytes, mask: bytes) -> bool:
    n, num_prompt = facts["num_tokens"], facts["num_prompt_tokens"]
    if (len(tokens), len(logprobs), len(mask)) != (4 * n, 4 * n, n) or not 0 < num_prompt < n:
        return False
    writer: list[int | None] = [None] * n
    end_before = 0
    for start, end, version in facts["version_spans"]:
        if start < end_before or start >= end or end > n:
            return False
        writer[start:end] = [version] * (end - start)
        end_before = end
    for place, (token, logprob, bit) in enumerate(
        zip(struct.unpack(f"<{n}i", tokens), struct.unpack(f"<{n}f", logprobs), mask, strict=True)
    ):
        is_written = writer[place] is not None
        if token < 0 or bit != is_written or (is_written and place < num_prompt):
            return False
        if not -math.inf < logprob <= 1e-3 or (logprob != 0 and not is_written):
            return False
    given = (facts["reward"], facts.get("reward_score") or 0.0)
    named = (*facts["reward_parts"].values(), *facts.get("reward_logs", {}).values())
    return all(-1e18 <= number <= 1e18 for number in (*given, *named))
