"""Runs `learner.audit.command`."""

import sys

from learner.audit.command import main

sys.exit(main(sys.argv[1:]))
