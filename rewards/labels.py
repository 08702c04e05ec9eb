"""A data row's label as the answers that are accepted."""

import math
from typing import Any

from rewards.sample import SampleError


def targets_of(label: Any, index: int) -> list[str]:
    """Return the accepted answers in a label: text, [text], {"target": ..} or {"ground_truth": {"target": ..}}.

    A whole number that a column of floats holds, 72.0, is the answer 72.
    index: which sample of the request it is. Raises: SampleError when the label holds no target.
    """
    found = label
    for key in ("ground_truth", "target"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    targets = found if isinstance(found, list) else [found]
    if not targets or not all(map(_is_target, targets)):
        raise SampleError(index, f"is {label!r:.80}, expected the answer's text, a list of texts or a target")
    return [_text_of(target) for target in targets]


def _text_of(target: str | float) -> str:
    return str(int(target) if isinstance(target, float) and target.is_integer() else target)


def _is_target(value: Any) -> bool:
    """Return whether a value can be an answer. NaN is how a missing number looks: every answer to it would be wrong."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)
