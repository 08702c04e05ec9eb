"""Runs `learner.report.write`."""

import sys

from learner.report.write import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
