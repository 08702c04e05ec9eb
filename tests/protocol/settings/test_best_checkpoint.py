"""eval.best names a figure that the run's evaluations have: by another one no checkpoint would ever be kept."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.settings.evaluation import EvalSettings

EVALUATED: dict[str, Any] = {"every_steps": 1, "samples": 6, "sets": [{"name": "aime", "data": "a", "samples": 1}]}


@pytest.mark.parametrize(
    ("best", "is_measured"),
    [
        ("eval/held_out/greedy", True),
        ("eval/held_out/pass@4", True),
        ("eval/held_out/pass@6", True),
        ("eval/held_out/majority@6", True),
        ("eval/aime/pass@1", True),
        ("eval/aime/a source/reward", True),
        ("eval/rewards", False),
        ("eval/hold_out/reward", False),
        ("eval/held_out/pass@3", False),
        ("eval/aime/pass@4", False),
        ("eval/aime/majority@1", False),
        ("eval/aime", False),
    ],
)
def test_best_checkpoint_is_chosen_by_what_is_measured(best: str, is_measured: bool) -> None:
    if is_measured:
        assert EvalSettings(**EVALUATED, best=best).best == best
        return
    with pytest.raises(ValidationError, match=f"eval.best = {best} is not a metric of this run"):
        EvalSettings(**EVALUATED, best=best)
