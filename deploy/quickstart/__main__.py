"""`python -m deploy.quickstart --out DIR [--seed N]`: make the quick start's files, or find them made."""

import argparse
from pathlib import Path

from deploy.quickstart.build import QuickstartSettings, build_quickstart


def main() -> None:
    """Write the files and say what is in the folder."""
    parser = argparse.ArgumentParser(prog="python -m deploy.quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that the files are written into")
    parser.add_argument("--seed", type=int, default=0, help="decides the splits, the demonstrations and the weights")
    arguments = parser.parse_args()
    made = build_quickstart(arguments.out, QuickstartSettings(seed=arguments.seed))
    print(f"quickstart {'made' if made else 'up to date'}: {arguments.out}")


if __name__ == "__main__":
    main()
