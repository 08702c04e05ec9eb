"""How the ledger names groups that a mean score left out or kept."""

import math
from collections.abc import Sequence

FILTERED = "filtered: "  # prefix for a group that was skipped because of its mean score
LEFT_OUT = f"{FILTERED}curriculum, "  # prefix for a prompt that the curriculum left out of an epoch
KEPT = "kept: "  # prefix for a group that was trained in spite of its mean score


def mean_score(scores: Sequence[float]) -> float:
    """Return the mean of a group's scores, in the order of its samples; exactly r when all are r."""
    return min(max(math.fsum(scores) / len(scores), min(scores)), max(scores))
