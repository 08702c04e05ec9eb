"""The form that every chaos command has: its options, and its figure on the last line with the exit status."""

import argparse


def options(doc: str, **defaults: object) -> argparse.Namespace:
    """Return `--seed` (1), `--short`, and `--KEY` for each default, typed as the default is."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="the form that continuous integration runs: seconds")
    for key, default in defaults.items():
        parser.add_argument(f"--{key}", type=type(default), default=default, help=f"default {default}")
    return parser.parse_args()


def conclude(name: str, holds: bool, **figures: object) -> int:
    """Print `NAME key=value ... holds=yes|no`; returns the exit status, 0 when it holds."""
    texts = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items()]
    print(" ".join([name, *texts, f"holds={'yes' if holds else 'no'}"]), flush=True)
    return 0 if holds else 1
