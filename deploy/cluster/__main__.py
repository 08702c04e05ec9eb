"""Runs `deploy.cluster.command`."""

import sys

from deploy.cluster.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
