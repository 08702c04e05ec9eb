"""The data sets that can be prepared: names, readers of their rows, and prompts. The wording of prompts is ours."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.errors import SettingsError

# A fraction or a time would lose its second half.
_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d.,]++)(?![/:^]|[ \t]+\d)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")


@dataclass(frozen=True)
class PreparedRow:
    """One row, ready to be written with verl's columns."""

    question: str  # user message
    ground_truth: Any  # expected answer: text, or {"target": [texts]}
    extra: dict[str, Any]  # further columns of extra_info


@dataclass(frozen=True)
class KnownSet:
    data_source: str
    ability: str
    is_like: str  # description of its files' columns
    read: Callable[[dict[str, Any]], PreparedRow]  # reader; raises SettingsError with a text to follow the row's place
    scorer: str  # bundled scorer for its labels


def read_gsm8k(row: dict[str, Any]) -> PreparedRow:
    """Return a row of gsm8k. Columns: `question`, and `answer` with a last line such as `#### 42`."""
    question, answer = text_of(row, "question"), text_of(row, "answer")
    found = _GSM8K_ANSWER.findall(answer)
    number = found[-1].replace(",", "").rstrip(".") if found and answer.count("####") == len(found) else ""
    if not number:
        raise SettingsError(f"has no number after #### in its answer: {answer[-80:]!r}.")
    asked = f"{question.strip()} Think step by step, and end with the number alone behind ####."
    return PreparedRow(asked, number, {"answer": answer, "question": question})


def read_math(row: dict[str, Any]) -> PreparedRow:
    """Return a row of MATH: `problem`, and `solution` with the answer in its last \\boxed{}."""
    problem, solution = text_of(row, "problem"), text_of(row, "solution")
    answer = last_boxed(solution)
    if not answer:
        raise SettingsError(f"has no \\boxed{{}} in its solution: {solution[-80:]!r}.")
    asked = f"{problem.strip()} Think step by step, and put the answer inside \\boxed{{}} at the end."
    return PreparedRow(asked, answer, {})


def read_nq(row: dict[str, Any]) -> PreparedRow:
    """Return a row of an open question: `question`, and `golden_answers`, any of which is right."""
    question, answers = text_of(row, "question").strip(), row.get("golden_answers")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) and one.strip() for one in answers):
        raise SettingsError(f"has golden_answers = {answers!r:.80}, expected a list of texts.")
    asked = (
        "Find the answer to the question below. Reason inside <think> and </think> whenever you have learned "
        "something. To look something up, write <search> what you look for </search>; what is found comes back between "
        "<information> and </information>. Search as often as you need. Then give the answer alone inside <answer> and "
        f"</answer>, such as <answer> Lisbon </answer>. Question: {question}{'' if question.endswith('?') else '?'}\n"
    )
    return PreparedRow(asked, {"target": answers}, {})


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{..} or \fbox{..}, with matched braces; None without one.

    Example: last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}". `\boxed 5` ends before a `$` or the next space.
    """
    marks = list(_BOXED.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0] or None
    depth = 0
    for place, sign in enumerate(rest):
        is_escaped = rest[:place].endswith("\\")
        depth += 0 if is_escaped else {"{": 1, "}": -1}.get(sign, 0)
        if not depth:
            return rest[1:place]
    return None


KNOWN_SETS = {
    "gsm8k": KnownSet("openai/gsm8k", "math", "question and answer", read_gsm8k, "math_answer"),
    "math": KnownSet("DigitalLearningGmbH/MATH-lighteval", "math", "problem and solution", read_math, "math_answer"),
    "nq_search": KnownSet("nq", "fact-reasoning", "question and golden_answers", read_nq, "exact_match"),
}


def verl_row(prepared: PreparedRow, data_source: str, ability: str, split: str, index: int) -> dict[str, Any]:
    """Return the row with the columns of verl and Search-R1. index: of the row in its split, from 0."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prepared.question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": prepared.ground_truth},
        "extra_info": {"split": split, "index": index, **prepared.extra},
    }


def text_of(row: dict[str, Any], column: str) -> str:
    """Return a column's text. Raises: SettingsError with a text to follow the row's place."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(f"has {column} = {value!r:.80}, expected text. Its columns are {sorted(row)}.")
    return value
