"""The algorithms that settings can name, and what is known of each before torch is imported.

`learner.algorithms.by_name` has what they compute; a test compares the two.
"""

import re
from collections.abc import Callable, Collection
from typing import Annotated

from pydantic import AfterValidator

# Advantage -> the fewest samples of a prompt that it takes. These give each token of an answer the same advantage.
ADVANTAGES_OF_GROUPS = {"grpo": 2, "dr_grpo": 2, "rloo": 2, "reinforce_pp_baseline": 2, "opo": 2}
# These give each token its own, from its own trajectory alone. Value: whether a critic is needed.
ADVANTAGES_OF_TOKENS = {"gae": True, "reinforce_pp": False}
LOSSES = ("ppo", "gspo", "cispo", "reinforce")
CORRECTIONS = ("none", "tis", "icepop", "geo_mask")
AGGREGATES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_norm")

_OWN = re.compile(r"[^:]+\.py:[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_own(name: str) -> bool:
    """Return whether the name is of a user's own algorithm, FILE.py:name or module:name."""
    return bool(_OWN.fullmatch(name))


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in names and not is_own(name):
            raise ValueError(f"expected one of {', '.join(names)}, or FILE.py:name, or module:name")
        return name

    return check


AdvantageName = Annotated[str, AfterValidator(_one_of([*ADVANTAGES_OF_GROUPS, *ADVANTAGES_OF_TOKENS]))]
LossName = Annotated[str, AfterValidator(_one_of(LOSSES))]
CorrectionName = Annotated[str, AfterValidator(_one_of(CORRECTIONS))]
