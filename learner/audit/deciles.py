"""Survivorship: are prompts with long answers leased again, or skipped, more often than those with short ones?

A system that loses what takes long trains on short answers, and no curve shows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.audit.run import AuditedRun
from learner.data.filtered import FILTERED

_NUM_PARTS = 10
_NUM_LONG = 3
# Standard errors from which a difference is called one: by chance alone 1 audit in 40 would call it so.
_SIGNIFICANT = 2.0


@dataclass(frozen=True)
class Decile:
    """A tenth of the prompts, by the length of their answers."""

    shortest: float | None  # model tokens, mean of the prompt's group; None: no answer of these prompts is known
    longest: float | None  # in the same unit; None as above
    num_prompts: int  # trained or skipped
    num_retried: int  # of them, leased more than once
    num_skipped: int  # of them, skipped
    attempts_mean: float  # leases of one prompt


@dataclass(frozen=True)
class Survivorship:
    """What became of prompts with short answers, and of those with long ones."""

    deciles: list[Decile]  # shortest answers first; prompts without any known answer last
    sentence: str  # whether long answers were leased again or skipped more often, beyond chance


@dataclass(frozen=True)
class _Prompt:
    length: float  # model tokens, mean of the group's trajectories; NaN: not known
    attempts: int  # leases
    is_skipped: bool  # False: trained


def compare_lengths(run: AuditedRun) -> Survivorship:
    """Return attempts and skips of all prompts that are accounted for, by the length of their answers."""
    prompts = _read_prompts(run)
    known = sorted((p for p in prompts if not math.isnan(p.length)), key=lambda p: p.length)
    parts = [known[len(known) * i // _NUM_PARTS : len(known) * (i + 1) // _NUM_PARTS] for i in range(_NUM_PARTS)]
    unknown = [p for p in prompts if math.isnan(p.length)]
    deciles = [_decile(part) for part in (*parts, unknown) if part]
    return Survivorship(deciles, _sentence(parts, len(unknown)))


def _read_prompts(run: AuditedRun) -> list[_Prompt]:
    rows = run.rows(
        'SELECT p."group", p.state, p.attempt, AVG(t.num_model_tokens) FROM prompts AS p '
        'LEFT JOIN trajectories AS t ON t."group" = p."group" '
        "WHERE p.state IN ('trained', 'skipped') AND COALESCE(p.reason, '') NOT LIKE ? GROUP BY p.\"group\"",
        f"{FILTERED}%",  # no prompt was lost there: the filter looked at it and took another
    )
    # A prompt that was given up may have no finished answer: what was thrown away of it tells how long they were.
    wasted = dict(
        run.rows(
            'SELECT "group", AVG(num_tokens) FROM waste WHERE num_tokens > 0 AND "group" IN '
            '(SELECT "group" FROM prompts WHERE state = \'skipped\') GROUP BY "group"'
        )
    )
    return [
        _Prompt(length if length is not None else wasted.get(group, math.nan), attempts, state == "skipped")
        for group, state, attempts, length in rows
    ]


def _decile(part: Sequence[_Prompt]) -> Decile:
    is_known = not math.isnan(part[0].length)
    return Decile(
        shortest=part[0].length if is_known else None,
        longest=part[-1].length if is_known else None,
        num_prompts=len(part),
        num_retried=sum(p.attempts > 1 for p in part),
        num_skipped=sum(p.is_skipped for p in part),
        attempts_mean=sum(p.attempts for p in part) / len(part),
    )


def _sentence(parts: Sequence[Sequence[_Prompt]], num_unknown: int) -> str:
    short = [p for part in parts[:-_NUM_LONG] for p in part]
    long = [p for part in parts[-_NUM_LONG:] for p in part]
    if len(short) < _NUM_PARTS or len(long) < _NUM_PARTS:
        return "Too few prompts are accounted for to compare long answers with short ones."
    retried = _against("leased again", [p.attempts > 1 for p in long], [p.attempts > 1 for p in short])
    skipped = _against("skipped", [p.is_skipped for p in long], [p.is_skipped for p in short])
    unknown = f" Of {num_unknown} prompts no answer's length is known." if num_unknown else ""
    return f"The prompts with the longest three tenths of the answers were {retried}, and {skipped}.{unknown}"


def _against(what: str, long: Sequence[bool], short: Sequence[bool]) -> str:
    """Return how often something happened to long answers and to the others, and whether that is more than chance."""
    in_long, in_short = sum(long) / len(long), sum(short) / len(short)
    both = (sum(long) + sum(short)) / (len(long) + len(short))
    error = math.sqrt(both * (1 - both) * (1 / len(long) + 1 / len(short)))
    is_more = in_long - in_short > _SIGNIFICANT * error
    return f"{'' if is_more else 'not '}{what} more often than the others ({in_long:.2%} against {in_short:.2%})"
