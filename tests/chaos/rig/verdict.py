"""What every chaos command and benchmark has in common: its options, its last line, its exit status."""

import argparse
from typing import Any


def options(doc: str, **defaults: Any) -> argparse.Namespace:
    """Return the command line's --seed and --short, and --KEY for each default, of the default's type.

    A default of False makes a flag.
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
    return parser.parse_args()


def conclude(name: str, holds: bool, **figures: object) -> int:
    """Print `NAME key=value ... holds=yes|no`; returns the exit status, 0 when it holds."""
    shown = (f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items())
    print(name, *shown, f"holds={'yes' if holds else 'no'}", flush=True)
    return 0 if holds else 1
