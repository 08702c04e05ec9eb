"""The importance weights that a correction trusts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """Bounds of an importance weight."""

    low: float  # weights below it are cut (icepop alone)
    high: float  # weights above it are cut
