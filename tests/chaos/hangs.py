"""Forty ways to hang: whoever waits says within the wait's limit and five seconds who did not answer, and goes on.

    python -m tests.chaos.hangs [--seed N] [--short]

A process is stopped (SIGSTOP), killed, or stalls, or the link to it is cut, at each wait of the learner, the rollout
servers and the weight push. The waiting side is the product's own, with limits of seconds; each way runs in processes
of its own, several at a time. holds: for each way one sentence came in time (hung=0) and named who did not answer, to
whom, what was awaited and what was last heard (wrong_names=0). `--short`: the same ways, more of them at a time, and
twenty seconds in place of five, since the machine may be busy.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.hanging.command_waits import command_ways
from tests.chaos.hanging.coordinator_waits import coordinator_ways
from tests.chaos.hanging.push_waits import push_ways
from tests.chaos.hanging.rank_waits import rank_ways
from tests.chaos.hanging.rollout_waits import rollout_ways
from tests.chaos.hanging.way import BUSY_GRACE_S, GRACE_S, Outcome, RunningWay, Way
from tests.chaos.rig.verdict import conclude, options

_POLL_S = 0.05


def main() -> int:
    arguments = options(__doc__)
    ways = [*command_ways(), *coordinator_ways(), *push_ways(), *rank_ways(), *rollout_ways()]
    random.Random(arguments.seed).shuffle(ways)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = _run_all(ways, Path(folder), at_once=8 if arguments.short else 4)
    grace_s = BUSY_GRACE_S if arguments.short else GRACE_S
    hung = [outcome for outcome in outcomes if outcome.has_hung(grace_s)]
    wrong = [outcome for outcome in outcomes if not outcome.has_hung(grace_s) and outcome.missing]
    for outcome in (*hung, *wrong):
        print(f"hangs: {outcome.way.name} said {outcome.said!r}; missing {outcome.missing}")
    late_s = max(outcome.seconds - outcome.way.limit_s for outcome in outcomes if outcome.seconds is not None)
    return conclude(
        "hangs",
        not hung and not wrong,
        ways=len(outcomes),
        hung=len(hung),
        wrong_names=len(wrong),
        longest_over_limit_s=late_s,
    )


def _run_all(ways: list[Way], folder: Path, at_once: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    waiting, running = list(ways), list[RunningWay]()
    while waiting or running:
        while waiting and len(running) < at_once:
            way = waiting.pop()
            running.append(RunningWay(way, folder / way.name))
        for one in list(running):
            if (outcome := one.outcome()) is not None:
                running.remove(one)
                outcomes.append(outcome)
                took = "never" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
                print(f"hangs: {outcome.way.name}: {took}: {outcome.said}", flush=True)
        time.sleep(_POLL_S)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
