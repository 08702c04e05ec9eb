"""`sluice prepare-data NAME --from FILES --to FOLDER`."""

import sys

from learner.data.prepare.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
