"""What every chaos command and benchmark has in common: its options, its last line, its exit status."""

import argparse
from collections.abc import Mapping
from typing import Any


def options(doc: str, least: Mapping[str, int] | None = None, **defaults: Any) -> argparse.Namespace:
    """Return the command line's --seed and --short, and --KEY for each default, of the default's type.

    A default of False makes a flag. least: numbers below which there would be nothing to conclude from, by KEY.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seeds everything that is drawn")
    parser.add_argument("--short", action="store_true", help="the form that CI runs: seconds")
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default)
    given = parser.parse_args()
    for name, number in (least or {}).items():
        if getattr(given, name) < number and not given.short:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: give at least {number}")
    return given


def conclude(name: str, holds: bool, **figures: object) -> int:
    """Print `NAME key=value ... holds=yes|no`; returns the exit status, 0 when it holds."""
    shown = (f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items())
    print(name, *shown, f"holds={'yes' if holds else 'no'}", flush=True)
    return 0 if holds else 1
