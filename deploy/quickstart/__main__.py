"""`python -m deploy.quickstart --out DIR [--seed N]`: make the quick start's files unless they exist."""

import argparse
import sys
from pathlib import Path

from deploy.quickstart.build import QuickstartSettings, build_quickstart


def main() -> int:
    """Return the exit code: 0 when the folder holds the files, 1 when they cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m deploy.quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that the files are written into")
    parser.add_argument(
        "--seed", type=_read_seed, default=0, help="random seed of the splits, the demonstrations and the weights"
    )
    arguments = parser.parse_args()
    try:
        made = build_quickstart(arguments.out, QuickstartSettings(seed=arguments.seed))
    except OSError as error:
        remedy = "Set --out to a folder with 100 MB free."
        print(f"quickstart: {arguments.out} cannot be written ({error.strerror}). {remedy}", file=sys.stderr)
        return 1
    print(f"quickstart {'made' if made else 'up to date'}: {arguments.out}")
    return 0


def _read_seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
