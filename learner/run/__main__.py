"""Runs `learner.run.command`."""

import sys

from learner.run.command import run_command

if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
