"""What each data set that can be prepared is called, how its rows are read, and what the policy is asked.

Columns and answers are those of the sets' files on the hub; the prompts' words are ours.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from learner.data.prepare.verl_row import Prepared, text_of
from protocol.errors import SettingsError

# A fraction or a time would lose its second half.
_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d.,]++)(?![/:^]|[ \t]+\d)")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")


@dataclass(frozen=True)
class KnownSet:
    """One data set that can be prepared."""

    data_source: str  # of each row
    ability: str  # of each row
    is_like: str  # the columns that its files have, in words
    read: Callable[[dict[str, Any]], Prepared]  # raises SettingsError, to stand behind the row's place
    scorer: str  # the bundled scorer that takes its labels


def read_gsm8k(row: dict[str, Any]) -> Prepared:
    """Return a row of gsm8k: `question`, and `answer` whose last line is `#### 42`."""
    question, answer = text_of(row, "question"), text_of(row, "answer")
    found = _GSM8K_ANSWER.findall(answer)
    number = found[-1].replace(",", "").rstrip(".") if found and answer.count("####") == len(found) else ""
    if not number:
        raise SettingsError(f"has no number behind #### in its answer: {answer[-80:]!r}.")
    asked = f"{question.strip()} Think step by step, and end with the number alone behind ####."
    return Prepared(asked, number, {"answer": answer, "question": question})


def read_math(row: dict[str, Any]) -> Prepared:
    """Return a row of MATH: `problem`, and `solution` with the answer in its last \\boxed{}."""
    problem, solution = text_of(row, "problem"), text_of(row, "solution")
    answer = last_boxed(solution)
    if not answer:
        raise SettingsError(f"has no \\boxed{{}} in its solution: {solution[-80:]!r}.")
    asked = f"{problem.strip()} Think step by step, and put the answer inside \\boxed{{}} at the end."
    return Prepared(asked, answer, {})


def read_nq(row: dict[str, Any]) -> Prepared:
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
    return Prepared(asked, {"target": answers}, {})


def last_boxed(text: str) -> str | None:
    r"""Return what the last \boxed{..} or \fbox{..} of a text holds, braces inside it matched; None without one.

    Example: last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}". Of `\boxed 5` it is what stands before a `$` or
    the next space.
    """
    marks = list(_BOXED.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0] or None
    depth = 0
    for place, sign in enumerate(rest):
        is_written = rest[:place].endswith("\\")  # a brace of the answer's own
        depth += 0 if is_written else {"{": 1, "}": -1}.get(sign, 0)
        if not depth:
            return rest[1:place]
    return None


KNOWN_SETS = {
    "gsm8k": KnownSet("openai/gsm8k", "math", "question and answer", read_gsm8k, "math_answer"),
    "math": KnownSet("DigitalLearningGmbH/MATH-lighteval", "math", "problem and solution", read_math, "math_answer"),
    "nq_search": KnownSet("nq", "fact-reasoning", "question and golden_answers", read_nq, "exact_match"),
}
