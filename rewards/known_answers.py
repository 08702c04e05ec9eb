"""Known answers that a user's function scores once when it is loaded: they show what it reads.

The rows of a run never change that.
"""

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import OperatorError
from protocol.one_line import one_line, place_of
from rewards.calling import as_async, form_of
from rewards.sample import Sample, make_sample

# Questions whose right answers score 0 when a function of Search-R1 reads the response alone: it looks for the
# assistant's turn, or skips the first answer, which is an example in the prompt.
_PROMPT = (
    "<|im_start|>user\nAnswer in tags, such as <answer> Beijing </answer>. What is 1 + 1?<|im_end|>\n"
    "<|im_start|>assistant\nAssistant: "
)
_TAGS = "<think>one more</think>\n<answer> {} </answer>"
_KNIGHTS = "(1) Ann is a knight\n(2) Bo is a knave"  # of Logic-RL
_VERL_ANSWERS: tuple[tuple[str, str, Any], ...] = (  # right, wrong, label
    ("2", "3", {"target": ["2"]}),
    ("1 + 1", "1 - 1", {"target": 2, "numbers": [1, 1]}),
    ("2", "3", "2"),
    ("2", "3", 2),
    (_KNIGHTS, "(1) Ann is a knave\n(2) Bo is a knight", {"solution_text_format": _KNIGHTS}),
)
# A right and a wrong answer to each label, in each of these forms.
_TRL_FORMS = (
    _TAGS,
    "<reasoning>\none more\n</reasoning>\n<answer>\n{}\n</answer>\n",
    "one more</think>\n<answer>{}</answer>",  # the prompt ends with <think>
    "<think>one more</think>\nThe answer is $\\boxed{{{}}}$.",
    "So \\boxed{{{}}}",
    "1 + 1 = {0}\n#### {0}",
    "{}",
    '{{"answer": {}}}',
    "<SOLUTION>{}</SOLUTION>",
    "```python\nprint({})\n```",
)
_TRL_LABELS: tuple[Any, ...] = ("2", "1 + 1 = 2\n#### 2", "So \\boxed{2}", 2, ["2"],
                                 {"ground_truth": {"target": ["2"]}})  # fmt: skip
_TRL_LIMIT_S = 30.0
_CALL_LIMIT_S = 60.0
HANGS = 76  # exit status of a process whose function did not return from a known answer
# A file with one of these looks for the assistant's turn in prompt and response, as Logic-RL's do.
_TURN_BEGINS = ("<|im_start|>assistant", "<|start_header_id|>assistant", "Assistant:", "<\uff5cAssistant\uff5c>")


def reads_sequence(function: Callable[..., Any]) -> bool:
    """Return whether a known right answer scores above 0 with its prompt only, as with Search-R1's functions.

    Functions with a data_source are verl's own, which pass the response alone.
    """
    if not _may_be_of_search_r1(function):
        return False
    for right, wrong, truth in _VERL_ANSWERS:
        with contextlib.suppress(Exception, SystemExit):  # labels of another form
            known = [_sample(_TAGS.format(answer), {"ground_truth": truth}) for answer in (right, wrong)]
            whole = [_rewards(function, [sample], "sequence")[0] for sample in known]
            # Of a function of length, wrong answers are worth as much.
            if whole[0] > max(0, whole[1]):
                alone = [_rewards(function, [sample], "response")[0] for sample in known]
                if alone[0] <= max(0, alone[1]):  # equal: it found the format, and no answer
                    return True
    return False


def reads_opened_thought(function: Callable[..., Any]) -> bool:
    """Return whether a right answer that ends a thought scores above 0 only behind the prompt's `<think>`."""
    if _may_be_of_search_r1(function):
        with contextlib.suppress(Exception, SystemExit):  # labels of another form
            prompt = f"{_PROMPT}<think>\n"
            known = [make_sample(f"{prompt}one more\n</think>\n\n\\boxed{{{answer}}}", prompt, "2") for answer in "23"]
            whole = [_rewards(function, [sample], "sequence")[0] for sample in known]
            return whole[0] > max(0, whole[1]) and _rewards(function, known[:1], "response")[0] <= 0
    return False


def names_turn(function: Callable[..., Any]) -> bool:
    """Return whether the function's file names the beginning of an assistant's turn, and it may get the prompt too."""
    if not _may_be_of_search_r1(function):
        return False
    with contextlib.suppress(OSError, TypeError):  # no source
        module = inspect.getmodule(inspect.unwrap(function))
        return module is not None and any(name in inspect.getsource(module) for name in _TURN_BEGINS)
    return False


def reads_calls(function: Callable[..., Any]) -> bool:
    """Return whether a TRL function names calls or replies of tools, which the one message of a completion lacks."""
    with contextlib.suppress(OSError, TypeError):  # no source
        source = inspect.getsource(inspect.unwrap(function))
        names = ("tool_calls", '"tool"', "'tool'")
        return "completions" in inspect.signature(function).parameters and any(name in source for name in names)
    return False


@dataclass
class _Tried:
    """The rewards of known answers as text, or as messages."""

    rewards: list[tuple[float, ...] | None] = field(default_factory=list)  # of a right and a wrong answer; None: raised
    error: BaseException | None = None

    @property
    def worth(self) -> tuple[int, bool]:
        known = [pair for pair in self.rewards if pair is not None]
        return sum(right > wrong for right, wrong in known), len({reward for pair in known for reward in pair}) > 1

    @property
    def is_usable(self) -> bool:
        return any(pair is not None for pair in self.rewards)


def reads_messages(function: Callable[..., Any], reference: str) -> bool:
    """Return whether a TRL function reads messages, not texts: the form that raises less, or tells answers apart.

    Raises: OperatorError if known answers do not decide.
    """
    text, messages = _Tried(), _Tried()
    deadline = time.monotonic() + _TRL_LIMIT_S
    for pair in _trl_pairs(inspect.signature(function).parameters):
        for tried, reads in ((text, "text"), (messages, "messages")):
            try:
                tried.rewards.append(_rewards(function, pair, reads))
            except (Exception, SystemExit) as error:
                tried.rewards.append(None)
                tried.error = error
        if time.monotonic() > deadline:
            break
    if text.is_usable != messages.is_usable:
        return messages.is_usable
    if text.worth != messages.worth:
        return messages.worth > text.worth
    if text.is_usable and any(text.worth) and text.rewards == messages.rewards:
        return False
    last = text.error or messages.error
    raised = "" if last is None else f" (last error: {one_line(repr(last), 120)} {place_of(last)})"
    raise OperatorError(
        f"rewards: known answers do not show whether {reference} reads completions as texts or as messages{raised}. "
        "Start with --completions messages if the rows of TRL were conversations, else with --completions text."
    )


def compares_samples(function: Callable[..., Any], reads: str) -> bool:
    """Return whether known answers score otherwise in one call than alone, as with rewards by the group's lengths."""
    required = [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]
    deadline = time.monotonic() + _TRL_LIMIT_S
    for label in _TRL_LABELS:
        columns = dict.fromkeys(required, label)
        known = [_sample(form.format(answer), label, columns) for form in _TRL_FORMS[3:5] for answer in ("2", "3")]
        with contextlib.suppress(Exception, SystemExit):  # labels of another form
            alone, again = ([_rewards(function, [each], reads)[0] for each in known] for _ in range(2))
            if alone == again and alone != list(_rewards(function, known, reads)):
                return True
            if len(set(alone)) > 1:
                return False
        if time.monotonic() > deadline:
            break
    return False


def _trl_pairs(parameters: Mapping[str, Any]) -> Iterator[list[Sample]]:
    required = [name for name, each in parameters.items() if each.default is each.empty]
    for label in _TRL_LABELS:
        columns = dict.fromkeys(required, label)
        for form in _TRL_FORMS:
            yield [_sample(form.format(answer), label, columns) for answer in ("2", "3")]
    columns = {**dict.fromkeys(required, 2), "nums": [1, 1], "numbers": [1, 1]}
    for form in _TRL_FORMS[:3]:
        yield [_sample(form.format(answer), 2, columns) for answer in ("1 + 1", "1 - 1")]


def _may_be_of_search_r1(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return "solution_str" in parameters and "data_source" not in parameters


def _sample(response: str, label: Any, columns: Mapping[str, Any] | None = None) -> Sample:
    return make_sample(_PROMPT + response, _PROMPT, label, columns, num_turns=1)


def _rewards(function: Callable[..., Any], samples: Sequence[Sample], reads: str) -> tuple[float, ...]:
    form = form_of(function, reads)
    assert form is not None
    limit = threading.Timer(_CALL_LIMIT_S, os._exit, [HANGS])
    limit.start()
    try:
        return tuple(score.reward for score in asyncio.run(_scored(form.score(as_async(function), samples))))
    finally:
        limit.cancel()


async def _scored(scores: Any) -> Any:
    return await scores
