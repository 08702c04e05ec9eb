"""Search-R1's environment: the policy writes `<search>`, reads passages in `<information>`, ends with `<answer>`.

Up to max_turns turns get an observation. One last turn follows, in which no search is run.
"""

import re
from collections.abc import Sequence

from rollout.environments.base import Observation, Prompt, Resources, Step, Task, Turn

_SEARCH_OPEN, _SEARCH_CLOSE = "<search>", "</search>"
_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"
_INFORMATION_OPEN, _INFORMATION_CLOSE = "<information>", "</information>"
# The title is the whole first line; the text below may have quotes of its own.
_TITLED = re.compile(r'"([^\n]*)"\n(.*)', flags=re.DOTALL)
# Without tags: a scorer that looks for the last answer must not find one here.
_CORRECTION = " That was neither a search nor an answer."
# The sentence that policies of Search-R1 were trained with.
_SEARCH_R1_CORRECTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


class Search:
    """One conversation with a retriever."""

    stop: tuple[str, ...] = (_SEARCH_CLOSE, _ANSWER_CLOSE)
    requires = frozenset({"search"})

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._num_turns = 0
        self._is_search_r1 = resources.search_words == "search_r1"

    async def reset(self, task: Task) -> Prompt:
        return task.prompt

    def snapshot(self) -> dict[str, int]:
        return {"turns": self._num_turns}

    async def resume(self, snapshot: dict[str, int]) -> None:
        self._num_turns = snapshot["turns"]

    async def step(self, turn: Turn) -> Step:
        """Return passages for a search, a correction for anything unclear, or the end."""
        self._num_turns += 1
        if has_answer(turn.text):
            return Step(is_done=True, finish="answer")
        if self._num_turns > self._resources.max_turns:
            return Step(is_done=True, finish="turns")
        query = query_of(turn)
        if query is None:
            return Step(Observation("", head=_SEARCH_R1_CORRECTION) if self._is_search_r1 else information(_CORRECTION))
        passages = await self._resources.search(query)
        if self._is_search_r1:
            return Step(information(_search_r1_passages(passages), around="\n\n"))
        return Step(information(render_passages(passages)))


def has_answer(text: str) -> bool:
    """Return whether text has a complete `<answer>...</answer>`."""
    start = text.find(_ANSWER_OPEN)
    return start >= 0 and text.find(_ANSWER_CLOSE, start) >= 0


def query_of(turn: Turn) -> str | None:
    """Return the turn's query; None when it is not a search.

    Example: `<search> country X</search>` -> "country X". Characters after the end tag belong
    to the token of its last character.
    """
    end = turn.text.rfind(_SEARCH_CLOSE)
    has_stopped = turn.stop_string == _SEARCH_CLOSE or turn.text.endswith(_SEARCH_CLOSE)
    start = turn.text.rfind(_SEARCH_OPEN, 0, max(end, 0))
    if not has_stopped or start < 0:
        return None
    return turn.text[start + len(_SEARCH_OPEN) : end].strip() or None


def information(body: str, around: str = "") -> Observation:
    """Return the observation with this body, between `around`. Only the body is cut when it is too long."""
    return Observation(body, head=around + _INFORMATION_OPEN, tail=_INFORMATION_CLOSE + around)


def _search_r1_passages(contents: Sequence[str]) -> str:
    """Return the passages as Search-R1 writes them: `Doc 1(Title: first line) the other lines` each."""
    parted = [passage.partition("\n") for passage in contents]
    return "\n".join(f"Doc {n}(Title: {title}) {text}" for n, (title, _, text) in enumerate(parted, 1)).strip()


def render_passages(contents: Sequence[str]) -> str:
    """Return the passages' text between the information tags: one line ` Title: text` each.

    A leading space gives a word the same tokens here, in a query and in an answer.
    """
    return "\n".join(_render(passage) for passage in contents) or " Nothing was found."


def _render(contents: str) -> str:
    titled = _TITLED.match(contents)
    if titled is None:
        return f" {contents.strip()}"
    return f" {titled[1].strip()}: {titled[2].strip()}"
