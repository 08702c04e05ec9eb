"""What a run has given up is counted in its ledger, while the run still writes it."""

from pathlib import Path

from learner.disk.run_folder import LEDGER
from learner.ledger.ledger import Ledger
from tests.chaos.rig.given_up import num_given_up


def test_prompts_that_a_run_has_skipped_are_counted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    for position in range(3):
        ledger.lease(f"e0-{position}", 0, f"p{position}", position, "s1", 1)
    ledger.commit()
    assert num_given_up(tmp_path) == 0
    ledger.set_state(["e0-0", "e0-2"], "skipped", reason="engine: it died")
    ledger.commit()
    assert num_given_up(tmp_path) == 2
    ledger.close()
