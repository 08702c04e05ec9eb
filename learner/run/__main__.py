"""Runs `learner.run.command`."""

import sys

from learner.run.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
