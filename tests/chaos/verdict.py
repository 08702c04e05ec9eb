"""What every chaos command shares: its options, the line with its figures, and its exit status."""

import argparse


def options(doc: str, **defaults: object) -> argparse.Namespace:
    """Return the command line's --seed N (default 1), --short, and --KEY for each default, typed as the default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="what the faults are drawn from")
    parser.add_argument("--short", action="store_true", help="the form of seconds that CI runs")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return parser.parse_args()


def conclude(name: str, holds: bool, **figures: object) -> int:
    """Print `NAME key=value ... holds=yes|no`, floats with four digits; returns the exit status."""
    shown = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items()]
    print(" ".join([name, *shown, f"holds={'yes' if holds else 'no'}"]), flush=True)
    return 0 if holds else 1
