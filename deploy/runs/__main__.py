"""Runs `deploy.runs.command`."""

import sys

from deploy.runs.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
