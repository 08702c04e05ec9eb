"""`python -m tests.chaos.soak`."""

import sys

from tests.chaos.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
