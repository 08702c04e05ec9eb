"""The scorers that come with Sluice, by the name that `rewards.serve --scorer` takes."""

from protocol.errors import OperatorError
from rewards.exact_match import score_exact_match
from rewards.sample import Scorer

_SCORERS: dict[str, Scorer] = {"exact_match": score_exact_match}


def scorer_named(name: str) -> Scorer:
    """Return a bundled scorer. Raises: OperatorError listing them when there is none of that name."""
    if name not in _SCORERS:
        raise OperatorError(f"rewards: --scorer {name} is not known. Choose one of: {', '.join(sorted(_SCORERS))}.")
    return _SCORERS[name]
