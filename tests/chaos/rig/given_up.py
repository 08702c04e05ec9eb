"""How many prompts a run has given up: among faults of processes, links and disks no prompt is at fault."""

import sqlite3
from contextlib import closing
from pathlib import Path

from learner.disk.run_folder import LEDGER


def num_given_up(run: Path) -> int:
    """Return how many prompts the ledger in a run's folder has as skipped; the run may still go on."""
    with closing(sqlite3.connect(f"file:{run / LEDGER}?mode=ro", uri=True)) as ledger:
        (number,) = ledger.execute("SELECT count(*) FROM prompts WHERE state = 'skipped'").fetchone()
    return int(number)
