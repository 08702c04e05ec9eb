"""Which rows can be learnt without generating: their form, the chat template, and the model's positions.

The tokenizer runs in a process of its own, because it imports torch.
"""

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from learner.data.prompt_reading import Refusal
from learner.data.prompts import Prompt
from learner.data.sft_forms import BadRowError
from learner.data.sft_rows import RowEncoder


class DemonstrationJudge:
    """Returns the reasons why rows cannot be learnt. forms: numbers of the others, by form."""

    def __init__(self, model: Path, form: str, *, trust_remote_code: bool) -> None:
        """form: data.form."""
        self.forms: Counter[str] = Counter()
        self._how = partial(judge_rows, model, form, trust_remote_code)
        self._child = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.shutdown(cancel_futures=True)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Refusal | None]:
        """Return the problem of each row, or None."""
        rows = [prompt.columns for prompt in prompts]
        found = self._child.submit(self._how, rows).result()
        self.forms.update(form for form, problem in found if not problem)
        return [Refusal(problem) if problem else None for _, problem in found]


def judge_rows(
    model: Path, form: str, trust_remote_code: bool, rows: Sequence[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Return the form and the problem of each row, as a sentence; the latter is empty for a row that can be learnt."""
    encoder = RowEncoder(model, form, trust_remote_code=trust_remote_code)
    found = []
    for row in rows:
        columns = problem = ""
        try:
            columns = encoder.form_of(row)
            encoder.encode(row)
        except BadRowError as error:
            problem = f"{error}."
        found.append((columns, problem))
    return found
