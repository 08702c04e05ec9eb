"""A network that loses, doubles, mixes up and damages messages in both directions: nothing is lost or trained twice.

    python -m tests.chaos.bad_network [--seed N] [--short]

10,000 trajectories (2,500 prompts x 4) from four servers; between every peer, the learner rank too, and the coordinator
stands a proxy: 20 % of the messages duplicated, 20 % out of order, 5 % corrupted, 5 % dropped. `--short`: 200
trajectories.
"""

import sys
import tempfile
from pathlib import Path

from learner import audit
from tests.chaos.frames.proxy import Faults, FrameProxy
from tests.chaos.rig.counting import count_trained
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Rig
from tests.chaos.rig.settings import reward_service, rig_home, rig_settings
from tests.chaos.rig.verdict import conclude, options

_GROUP_SIZE = 4


def main() -> int:
    arguments = options(__doc__)
    num_prompts, groups_per_step = (50, 25) if arguments.short else (2500, 50)
    with tempfile.TemporaryDirectory() as name, rig_home(Path(name)) as keys, reward_service(Path(name)) as url:
        settings = rig_settings(
            Path(name),
            url,
            num_prompts=num_prompts,
            epochs=1,
            seed=arguments.seed,
            learner={"groups_per_step": groups_per_step, "max_staleness": 2},
            rollout={"group_size": _GROUP_SIZE, "max_groups_in_flight": 64},
        )
        faults = Faults(arguments.seed, dropped=0.05, duplicated=0.2, reordered=0.2, corrupted=0.05)
        proxy = FrameProxy(keys, faults)
        rig = Rig(settings, keys, num_servers=4, pace=Pace(arguments.seed), route=proxy.route)
        print(f"bad_network: {rig.run(limit_s=1800.0)}", flush=True)
        did = proxy.close()
        print(f"bad_network: {did} {dict(rig.counts)}")
        lost, twice, partial = count_trained(rig.folder, settings, epochs=1)
        has_audit_passed = audit.main([str(rig.folder)]) == 0
    holds = has_audit_passed and lost == twice == partial == 0 and rig.counts["lives"] == 1
    return conclude(
        "bad_network",
        holds,
        trajectories=num_prompts * _GROUP_SIZE,
        messages=did["messages"],
        lost=lost,
        trained_twice=twice,
        unaccounted=partial,
        audit="passed" if has_audit_passed else "failed",
    )


if __name__ == "__main__":
    sys.exit(main())
