"""The memory that a proof tells of is its own process's."""

import subprocess
import sys


def test_a_process_tells_its_own_memory_and_not_that_of_whoever_started_it() -> None:
    starter = "import os, subprocess, sys; kept = os.urandom(400 << 20); sys.exit(subprocess.call(sys.argv[1:]))"
    asks = "from learner.rank.proof.own_memory import own_peak_mib; print(own_peak_mib())"
    ended = subprocess.run(
        [sys.executable, "-c", starter, sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True, check=True
    )
    assert 0 < int(ended.stdout) < 400
