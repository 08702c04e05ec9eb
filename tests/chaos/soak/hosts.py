"""The soak's faults between hosts that are namespaces of this machine, for tests/machines/hosts.sh --soak.

    python -m tests.chaos.soak.hosts [--seed N] --seconds N --links LINK,LINK --hosts PID,PID

links: of hosts whose network may be cut or slow, as this machine names them. hosts: of each host the process that all
others of it descend from. Processes of ours are killed and stopped, links are cut for 30 s or carry 1 Mbit/s for 20 s;
at the end nothing is stopped, cut or slow any more.
"""

import argparse
import random
import subprocess
import sys
import time

import psutil

from tests.chaos.soak.nemesis import Lasting, Nemesis
from tests.chaos.soak.processes import OURS, processes_of_hosts

_POLL_S = 0.25
_CUT_S, _SLOW_S = 30.0, 20.0
_PAUSE_S = (8.0, 30.0)
_SLOW = ("rate", "1mbit", "burst", "32kbit", "latency", "400ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--links", required=True)
    parser.add_argument("--hosts", required=True)
    given = parser.parse_args()
    hosts = [psutil.Process(int(pid)) for pid in given.hosts.split(",")]
    others = {name: fault for link in given.links.split(",") for name, fault in _link_faults(link).items()}
    names = [f"{verb} {kind}" for verb in ("kill", "stop") for kind in OURS]
    nemesis = Nemesis(lambda: processes_of_hosts(hosts), names, others, random.Random(given.seed), _PAUSE_S)
    began = time.monotonic()
    try:
        while (passed := time.monotonic() - began) < given.seconds:
            if (name := nemesis.poll(passed)) is not None:
                print(f"soak: {passed:6.0f} s  {name}", flush=True)
            time.sleep(_POLL_S)
    finally:
        nemesis.rest()
    print("soak:", *(f"{number} x {name};" for name, number in sorted(nemesis.begun.items())), flush=True)
    return 0


def _link_faults(link: str) -> dict[str, Lasting]:
    return {
        f"cut {link}": Lasting(
            lambda: _tell("ip", "link", "set", link, "down"), lambda: _tell("ip", "link", "set", link, "up"), _CUT_S
        ),
        f"slow {link}": Lasting(
            lambda: _tell("tc", "qdisc", "add", "dev", link, "root", "tbf", *_SLOW),
            lambda: _tell("tc", "qdisc", "delete", "dev", link, "root"),
            _SLOW_S,
        ),
    }


def _tell(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
