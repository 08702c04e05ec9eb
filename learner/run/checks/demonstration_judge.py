"""Which rows can be learnt without generating: their form, the chat template, and the model's positions.

The tokenizer runs in a process of its own, because it imports torch.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from learner.data.prompt_reading import Refusal
from learner.data.prompts import Prompt
from learner.data.sft_forms import BadRowError
from learner.data.sft_rows import RowEncoder
from learner.run.checks.prompt_judge import tokenizer_process


class DemonstrationJudge:
    """Returns the reasons why rows cannot be learnt. forms, longest: of the others."""

    def __init__(self, model: Path, form: str, *, trust_remote_code: bool) -> None:
        """form: data.form."""
        self.forms: Counter[str] = Counter()  # number of rows, by form
        self.longest = 0  # tokens
        self._how = partial(judge_rows, model, form, trust_remote_code)
        self._child = tokenizer_process()

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
        self.forms.update(form for form, problem, _ in found if not problem)
        self.longest = max([self.longest, *(num_tokens for _, _, num_tokens in found)])
        return [Refusal(problem) if problem else None for _, problem, _ in found]


def judge_rows(
    model: Path, form: str, trust_remote_code: bool, rows: Sequence[dict[str, Any]]
) -> list[tuple[str, str, int]]:
    """Return each row's form, its problem as a sentence (empty: it can be learnt), and its longest text in tokens."""
    encoder = RowEncoder(model, form, trust_remote_code=trust_remote_code)
    found = []
    for row in rows:
        columns, problem, num_tokens = "", "", 0
        try:
            columns = encoder.form_of(row)
            num_tokens = max(len(each.tokens) for each in encoder.encode(row))
        except BadRowError as error:
            problem = f"{error}."
        found.append((columns, problem, num_tokens))
    return found
