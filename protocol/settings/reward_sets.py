"""The sets of reward endpoints of a run, numbered from 1, the settings' own: a running run can be given another one.

They lie in the run folder's rewards.json. A start of the run adds the set of its settings where these have changed
since the last start; `python -m rewards.endpoints` adds others. The newest is in force, after a restart too: whoever
spoke last, the settings or the command, is obeyed.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from protocol.disk.files import replace_file
from protocol.disk.lock import locked
from protocol.errors import OperatorError
from protocol.settings.rewards import RewardEndpoint, RewardsSettings
from protocol.settings.section import CountAboveZero, Seconds, Section

REWARD_SETS = "rewards.json"
# Which server scores by which set: written by the run's coordinator, at least every ten seconds.
REWARDS_IN_USE = "rewards_in_use.json"
_LOCK = ".rewards.lock"


class RewardSet(Section):
    """Who scores, from one moment on; the part of the rewards settings that a running run can be given anew."""

    number: CountAboveZero  # 1, 2, ..; a number never gets another meaning within a run
    since: float = Field(ge=0)  # Unix seconds at which it was added
    source: Literal["settings", "command"]  # of a start of the run, or of `rewards.endpoints`
    endpoints: list[RewardEndpoint] = Field(max_length=63)  # empty: the cluster's own service
    combine: Literal["sum", "mean", "product", "shard"]
    shadow_wait_s: Seconds

    def over(self, rewards: RewardsSettings) -> RewardsSettings:
        """Return rewards settings with this set's endpoints in place of their own."""
        parts = {"endpoints": self.endpoints, "combine": self.combine, "shadow_wait_s": self.shadow_wait_s}
        return rewards.model_copy(update=parts)

    def scores_as(self, rewards: RewardsSettings) -> bool:
        """Return whether these rewards settings name the same endpoints, combined in the same way."""
        return self.over(rewards) == rewards

    def describe(self) -> str:
        """Return its endpoints in words: "math, format (shadow); sum"."""
        names = [f"{one.name}{' (shadow)' if one.shadow else ''}" for one in self.endpoints]
        return f"{', '.join(names) or 'the service of the cluster'}; {self.combine}"


class _File(Section):
    sets: list[RewardSet] = Field(min_length=1)


def first_set(rewards: RewardsSettings, number: int = 1) -> RewardSet:
    """Return the set that a run's settings name."""
    return new_set(rewards, number, "settings")


def new_set(rewards: RewardsSettings, number: int, source: Literal["settings", "command"]) -> RewardSet:
    """Return the set that these rewards settings are, added now."""
    parts = {"endpoints": rewards.endpoints, "combine": rewards.combine, "shadow_wait_s": rewards.shadow_wait_s}
    return RewardSet(number=number, since=time.time(), source=source, **parts)


def read_sets(folder: Path) -> list[RewardSet]:
    """Return a run's sets in order; none before its first start. Raises: OperatorError for a file that is none."""
    path = folder / REWARD_SETS
    try:
        sets = _File.model_validate_json(path.read_bytes()).sets
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OperatorError(
            f"{path} is no list of reward sets ({where}: {first['msg']}). Change it by python -m rewards.endpoints "
            "alone; without the file, the next start goes by its settings."
        ) from None
    numbers = [one.number for one in sets]
    if numbers != sorted(set(numbers)):
        raise OperatorError(f"{path} holds the sets {numbers}; expected rising numbers. Put the file back as it was.")
    return sets


def with_start(sets: Sequence[RewardSet], rewards: RewardsSettings, known: int = 0) -> list[RewardSet]:
    """Return a run's sets at a start with these rewards settings: a new one where they changed since the last start.

    known: newest number that the run's accounts name; a new set's number is above it.
    """
    own = [one for one in sets if one.source == "settings"]
    if own and own[-1].scores_as(rewards):
        return list(sets)
    newest = max([known, *(one.number for one in sets)])
    return [*sets, first_set(rewards, newest + 1)]


@contextmanager
def changing_sets(folder: Path) -> Iterator[None]:
    """Keep every other process from changing the sets within the block. Raises: OperatorError for a folder that cannot
    be written."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / _LOCK, wait_s=math.inf))
        except OSError as error:
            raise OperatorError(f"The run folder {folder} cannot be written: {error.strerror}.") from None
        yield


def write_sets(folder: Path, sets: Sequence[RewardSet]) -> None:
    """Replace the run's sets in one step; to be called within `changing_sets`. Raises: OperatorError."""
    path = folder / REWARD_SETS
    try:
        replace_file(path, _File(sets=list(sets)).model_dump_json(indent=1).encode())
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}. Free the disk, then try again.") from None
