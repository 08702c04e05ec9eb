"""Options of other trainers, with the setting that does the same: the tables of `sluice migrate` and of error messages.

A line of a table: names of one option, its usual one first | setting | conversion | the other trainer's default, where
it differs. "part.*" stands for every name below part.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

ALWAYS, MISSING = "=", "-"
JOINT = "joint"
TABLES = (  # the order in which error messages look a name up; the first one has any end of it first
    *("other", "openrlhf_rl", "openrlhf", "verl", "trl_rl", "trl"),
    *("search_r1", "trl_async", "openrlhf_rows", "verl_rows", "trl_rows"),
)
_FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True)
class Option:
    name: str  # its usual name in the other trainer
    setting: str  # setting of Sluice; ALWAYS: always so; MISSING: no counterpart
    conversion: str  # change of the value, JOINT: together with other options; of ALWAYS and MISSING: the reason
    default: str  # the other trainer's default; of MISSING: values that mean the same as leaving it out

    @property
    def is_setting(self) -> bool:
        return self.setting not in (ALWAYS, MISSING)


@cache
def options_of(*tables: str) -> dict[str, Option]:
    """Return the options of tables by each of their names; the first table that has a name decides."""
    found: dict[str, Option] = {}
    for table in tables:
        for line in (_FOLDER / f"{table}.table").read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                names, setting, conversion, default = (*(part.strip() for part in line.split("|")), "")[:4]
                for name in names.split():
                    found.setdefault(name, Option(names.split()[0], setting, conversion, default))
    return found


def option_named(name: str, options: dict[str, Option]) -> Option | None:
    """Return the option of a name, or the one of the nearest "part.*" above it."""
    parts = name.split(".")
    above = (".".join(parts[:length]) + ".*" for length in range(len(parts) - 1, 0, -1))
    return next((options[each] for each in (name, *above) if each in options), None)


def elsewhere(name: str) -> Option | None:
    """Return the option of another trainer that a name, or the longest end of a dotted one, is most likely.

    Example: trainer.optim.lr, then optim.lr, then lr
    """
    parts = name.replace("-", "_").split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    first = options_of(TABLES[0])
    return next((found[end] for found in (first, _by_end()) for end in ends if end in found), None)


@cache
def _by_end() -> dict[str, Option]:
    """Return options by name and by each end of a dotted name; of an end's several options a setting comes first."""
    options = options_of(*TABLES)
    ends: dict[str, Option] = {}
    for name, option in sorted(options.items(), key=lambda item: not item[1].is_setting):
        parts = name.split(".")
        for start in range(1, len(parts)):
            ends.setdefault(".".join(parts[start:]), option)
    return ends | options
