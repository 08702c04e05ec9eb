"""Servers, coordinators and learners are killed all through a run: no prompt is lost, trained twice or unaccounted.

    python -m tests.chaos.kills [--seed N] [--short] [--filtered]

2,000 prompts x 4 samples, 2 epochs, 200 SIGKILLs (120 servers, 40 coordinators, 40 learners) at any moment.
Real coordinator, ledger, checkpoints, sockets, rollout servers and reward service; the engine is paced by script and
the learner counts instead of training (tests/chaos/rig/processes.py). Counted twice: by `learner.audit`, and by what
the learner that survived had in its last checkpoint. `--short`: 200 prompts, one epoch, 12 kills.
`--filtered`: with dynamic sampling, which replaces about half of the groups, and none that it takes out is trained: 400
prompts and 60 kills, 80 and 9 if short.
"""

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from learner import audit
from tests.chaos.rig.counting import count_filtered, count_trained
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Rig
from tests.chaos.rig.settings import reward_service, rig_home, rig_settings
from tests.chaos.rig.verdict import conclude, options

_GROUP_SIZE = 4
# Of the number of a's in a text of 60 letters on average: about half of all groups of four lie between them.
_FILTER = {"dynamic_sampling": True, "low": 5.5, "high": 10.5, "max_replaced": 0}
# (is filtered, is short) -> prompts, epochs, kills of servers, coordinators and learners.
_SIZES = {
    (False, False): (2000, 2, (120, 40, 40)),
    (False, True): (200, 1, (7, 2, 3)),
    (True, False): (400, 1, (36, 12, 12)),
    (True, True): (80, 1, (5, 2, 2)),
}


class _Killer:
    """Kills at random moments, spread over the run's steps; a coordinator or learner only when there is one."""

    def __init__(self, seed: int, num_steps: int, **num_kills: int) -> None:
        draw = random.Random(seed)
        kinds = [kind for kind, number in num_kills.items() for _ in range(number)]
        # The last steps are left alone, so that every kill is met by a run that has work left.
        self._due = sorted((draw.uniform(0.0, 0.9 * num_steps), kind) for kind in kinds)
        self._due.reverse()
        self._random = draw
        self._furthest = 0
        self.killed: Counter[str] = Counter()

    def __call__(self, rig: Rig, now: float) -> None:
        self._furthest = max(self._furthest, rig.step)
        if not self._due or self._due[-1][0] > self._furthest or self._random.random() < 0.8:
            return  # not at once: anywhere within the step
        kind = self._due[-1][1]
        parts = {"coordinator": [rig.coordinator], "learner": [rig.learner], "server": [*rig.servers.values()]}[kind]
        part = self._random.choice(parts)
        if part is None or not part.process.is_alive() or rig.learner is None:
            return
        part.kill()
        self._due.pop()
        self.killed[kind] += 1


def main() -> int:
    arguments = options(str(__doc__), filtered=False)
    num_prompts, epochs, kills = _SIZES[arguments.filtered, arguments.short]
    with tempfile.TemporaryDirectory() as name, rig_home(Path(name)) as keys, reward_service(Path(name)) as url:
        folder = Path(name)
        settings = rig_settings(
            folder,
            url,
            num_prompts=num_prompts,
            epochs=epochs,
            seed=arguments.seed,
            learner={"groups_per_step": 10, "max_staleness": 2},
            rollout={"group_size": _GROUP_SIZE},
            filters=_FILTER if arguments.filtered else {},
        )
        killer = _Killer(
            arguments.seed,
            settings.run.max_steps,
            **dict(zip(("server", "coordinator", "learner"), kills, strict=True)),
        )
        rig = Rig(settings, keys, num_servers=4, pace=Pace(arguments.seed), disturb=killer)
        print(f"kills: {rig.run(limit_s=220.0 if arguments.short else 1800.0)}", flush=True)
        print(f"kills: {dict(rig.counts)}")
        lost, twice, partial = count_trained(rig.folder, settings, epochs)
        filtered, wrongly_trained = count_filtered(rig.folder, settings) if arguments.filtered else (0, 0)
        has_audit_passed = audit.main([str(rig.folder)]) == 0
    figures = {f"killed_{kind}": number for kind, number in sorted(killer.killed.items())}
    if arguments.filtered:
        figures |= {"filtered": filtered, "filtered_and_trained": wrongly_trained}
    holds = has_audit_passed and sum(killer.killed.values()) == sum(kills) and lost == twice == partial == 0
    holds = holds and wrongly_trained == 0 and bool(filtered) == arguments.filtered
    audited = "passed" if has_audit_passed else "failed"
    return conclude("kills", holds, **figures, lost=lost, trained_twice=twice, unaccounted=partial, audit=audited)


if __name__ == "__main__":
    sys.exit(main())
