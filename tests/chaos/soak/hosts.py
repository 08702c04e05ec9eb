"""The soak between hosts that are namespaces of this machine, for tests/machines/hosts.sh --soak.

    python -m tests.chaos.soak.hosts [--seed N] [--kills] --seconds N --metrics FILE
        --links LINK,... --hosts PID,... --disks FOLDER,...

metrics: metrics.jsonl of a run that trains. links: of hosts whose network may be cut or slow, as this machine names
them. hosts: of each host the process that buries all others of it. disks: of each host a folder on its own disk.

A quarter of the time nothing is done. Then every kind of process of ours, and of Ray's but its GCS, is killed and
stopped on any host; links are cut for 30 s or carry 1 Mbit/s for 20 s, and a host's disk is full for 20 s. What a node
has lost is begun again by what runs on the host, and the run's command by whoever gave it. At the end nothing is
stopped, cut, slow or full any more. `--kills`: one SIGKILL a minute and nothing else, and once more nothing for a
quarter of the time: a machine's own speed changes within minutes, so what is undisturbed is measured on both sides.

holds: the run trains 3 steps within 5 minutes then, no step is missing, no prompt was given up, the held-out score
(where there is one) is at most 0.1 below the one before the faults, no kind of process has grown by more than 5 % since
the tenth minute of its processes, and with --kills at least 80 % of the undisturbed samples a second were trained.
Standstills are named.
"""

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.chaos.rig.verdict import conclude
from tests.chaos.soak.disk import filled
from tests.chaos.soak.findings import Findings, num_given_up
from tests.chaos.soak.memory_growth import MemoryGrowth, say_growth
from tests.chaos.soak.nemesis import Find, Lasting, Nemesis
from tests.chaos.soak.processes import COMMANDS, OURS, RAYS, processes_of_hosts
from tests.chaos.soak.step_lines import is_whole, read_lines, score, standstills, steps_per_s, within

_POLL_S = 0.25
_CUT_S, _SLOW_S = 30.0, 20.0
_PAUSE_S, _KILLS_PAUSE_S = (8.0, 30.0), (50.0, 70.0)
_SLOW = ("rate", "1mbit", "burst", "32kbit", "latency", "400ms")
_GROWS_S = 600.0
_LONG_S = 30.0
_RECOVERY_S, _RECOVERY_STEPS = 300.0, 3


def main() -> int:
    given = _given()
    hosts = [psutil.Process(int(pid)) for pid in given.hosts.split(",")]

    def find() -> dict[str, list[psutil.Process]]:
        return dict(processes_of_hosts(hosts))

    nemesis, growth, metrics = _nemesis(given, find), MemoryGrowth(_GROWS_S), Path(given.metrics)
    began_s = time.time()
    _pass(given.seconds / 4.0, None, growth, find)
    calm_lines, faults_s = read_lines(metrics), time.time()
    print(f"soak: undisturbed: {steps_per_s(calm_lines, began_s, faults_s):.3f} steps/s", flush=True)
    _pass(given.seconds, nemesis, growth, find)
    over_s = time.time()
    has_recovered = _recovers(metrics, over_s)
    calm_rate = steps_per_s(calm_lines, began_s, faults_s)
    if given.kills:
        calm_rate = (calm_rate + _rate_after(given.seconds / 4.0, growth, find, metrics)) / 2.0
    lines = read_lines(metrics)
    findings = Findings(
        num_faults=sum(nemesis.begun.values()),
        has_recovered=has_recovered,
        is_whole=is_whole(lines),
        growth=say_growth(growth),
        goodput=steps_per_s(lines, faults_s, over_s) / calm_rate if calm_rate else 0.0,
        score=score(within(lines, faults_s, time.time())),
        calm_score=score(calm_lines),
        num_given_up=num_given_up(metrics.parent),
        is_goodput_held=given.kills,
    )
    print("soak:", *(f"{number} x {name};" for name, number in sorted(nemesis.begun.items())))
    print("soak: never", *(f"{name};" for name in nemesis.unmet))
    for at_s, seconds in standstills(within(lines, began_s, time.time()), _LONG_S):
        print(f"soak: no step for {seconds:.0f} s from {at_s - faults_s:.0f} s on")
    for words in findings.broken():
        print(f"soak: {words}")
    return conclude(
        "soak",
        not findings.broken(),
        faults=findings.num_faults,
        steps=len(lines),
        given_up=findings.num_given_up,
        goodput=findings.goodput,
        growth=findings.worst_growth,
        eval_reward=findings.score,
        calm_eval_reward=findings.calm_score,
        recovered="yes" if has_recovered else "no",
    )


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, required=True)
    for name in ("--metrics", "--links", "--hosts", "--disks"):
        parser.add_argument(name, required=True)
    parser.add_argument("--kills", action="store_true")
    return parser.parse_args()


def _nemesis(given: argparse.Namespace, find: Find) -> Nemesis:
    kinds = (*OURS, *COMMANDS, *RAYS)
    if given.kills:
        return Nemesis(find, [f"kill {kind}" for kind in kinds], {}, random.Random(given.seed), _KILLS_PAUSE_S)
    others = {name: fault for link in given.links.split(",") for name, fault in _link_faults(link).items()}
    others |= {f"fill {disk}": filled(Path(disk)) for disk in given.disks.split(",")}
    names = [f"{verb} {kind}" for verb in ("kill", "stop") for kind in kinds]
    return Nemesis(find, names, others, random.Random(given.seed), _PAUSE_S)


def _pass(seconds: float, nemesis: Nemesis | None, growth: MemoryGrowth, find: Find) -> None:
    """Let so much time pass; nothing is in force at its end."""
    began = time.monotonic()
    try:
        while (passed := time.monotonic() - began) < seconds:
            growth.take(time.monotonic(), find)
            if nemesis is not None and (name := nemesis.poll(passed)) is not None:
                print(f"soak: {passed:6.0f} s  {time.strftime('%H:%M:%S')}  {name}", flush=True)
            time.sleep(_POLL_S)
    finally:
        if nemesis is not None:
            nemesis.rest()


def _rate_after(seconds: float, growth: MemoryGrowth, find: Find, metrics: Path) -> float:
    """Return the steps a second of so much time in which nothing is done."""
    since_s = time.time()
    _pass(seconds, None, growth, find)
    rate = steps_per_s(read_lines(metrics), since_s, time.time())
    print(f"soak: undisturbed once more: {rate:.3f} steps/s", flush=True)
    return rate


def _recovers(metrics: Path, since_s: float) -> bool:
    """Return whether the run trains again now that nothing disturbs it."""
    while time.time() < since_s + _RECOVERY_S:
        if len(within(read_lines(metrics), since_s, time.time())) >= _RECOVERY_STEPS:
            return True
        time.sleep(_POLL_S)
    return False


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
