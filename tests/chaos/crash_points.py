"""SIGKILL at every failpoint of saving, restoring, accounting and pushing: every run recovers, `latest` stays valid.

    python -m tests.chaos.crash_points [--seed N] [--short]

Every name of `protocol.failpoints.FAILPOINTS`: those of the weight push in runs on real vLLM, DeepSpeed and Ray
(`push_crashes`), on a cluster of its own; all others in runs of the rig (`rig_crashes`), but for those of the turns on
a shared device, which `python -m tests.chaos.turn_kills` meets. `--short`: four failpoints of
the rig; `tests/flow/test_push_crashes.py` has a short form of the others.
"""

import sys
import tempfile
from pathlib import Path

from protocol.failpoints import FAILPOINTS
from tests.chaos.rig.crashes import crash_in_rig
from tests.chaos.rig.push_crashes import PUSH_FAILPOINTS, crash_in_pushes, pushing_cluster
from tests.chaos.rig.turn_run import TURN_FAILPOINTS
from tests.chaos.rig.verdict import conclude, options

_SHORT = ("checkpoint.commit.renamed", "run_folder.ledger_replaced", "ledger.commit.before", "step_book.after_account")


def main() -> int:
    arguments = options(__doc__)
    in_rig = (
        _SHORT
        if arguments.short
        else tuple(name for name in FAILPOINTS if name not in (*PUSH_FAILPOINTS, *TURN_FAILPOINTS))
    )
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        for outcome in crash_in_rig(Path(name), in_rig, arguments.seed):
            print(outcome, flush=True)
            outcomes.append(outcome)
        if not arguments.short:
            with pushing_cluster(Path(name)) as (cluster, user):
                for failpoint in PUSH_FAILPOINTS:
                    outcomes.append(crash_in_pushes(cluster, user, failpoint))
                    print(outcomes[-1], flush=True)
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    deaths = sum(outcome.deaths for outcome in outcomes)
    return conclude("crash_points", not failed, failpoints=len(outcomes), deaths=deaths, failed=failed)


if __name__ == "__main__":
    sys.exit(main())
