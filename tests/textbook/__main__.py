"""Runs `tests.textbook.command`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # `python -m` looks in the working folder first, where a user may well have a `protocol/` of their own.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.textbook.command import main

    sys.exit(main(sys.argv[1:]))
