"""Retriever and reward service killed ten times each in a run: the keeper has them back, nothing is lost.

    python -m tests.chaos.services [--seed N] [--short]

A keeper in this process, the bundled services, and a run with real coordinator, sockets, sessions and clients around a
scripted engine (`tests.chaos.rig.neighbours`). SIGKILL hits the services in an order that is drawn. holds: each is
healthy again at most 30 s later, since the machine may be busy; every sample is trained once, with the passage and the
reward of its own text (lost=0 wrong=0 trained_twice=0 dead_letters=0). --short: two kills of each.
`tests.chaos.soak.hosts` kills them in a run on three hosts.
"""

import asyncio
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from deploy.node.home import this_home
from deploy.node.processes import find
from deploy.node.service import is_healthy
from protocol.node.home import ProcessRecord, read_cluster
from tests.chaos.rig.kept_services import kept_services, passage_of, play_against, reward_of
from tests.chaos.rig.neighbours import GROUP_SIZE, GROUPS_PER_STEP
from tests.chaos.rig.verdict import conclude, options

_NAMES = ("retriever", "reward")
_GIVEN_UP_S = 30.0
_POLL_S = 0.05
_TURNS = re.compile(r"<search>(.*?)</search><information>(.*?)</information>", flags=re.DOTALL)


def main() -> int:
    arguments = options(__doc__ or "")
    draw = random.Random(arguments.seed)
    victims = [name for name in _NAMES for _ in range(2 if arguments.short else 10)]
    draw.shuffle(victims)
    # About 4 s for a kill, at 8 samples a second; what is played meanwhile waits for the service.
    num_groups = -(-len(victims) * 4 * 8 // GROUP_SIZE // GROUPS_PER_STEP) * GROUPS_PER_STEP
    seconds: list[float] = []

    async def during() -> None:
        for name in victims:
            seconds.append(await asyncio.to_thread(kill, name))
            await asyncio.sleep(draw.uniform(0.2, 1.0))

    with tempfile.TemporaryDirectory() as folder, kept_services(Path(folder)) as urls:
        outcome = asyncio.run(play_against(*urls, num_groups, draw, during))
    wrong = 0
    for text, reward, _ in outcome.trained.values():
        turns = _TURNS.findall(text)
        wrong += len(turns) != 1 or passage_of(turns[0][0]) not in turns[0][1] or reward != reward_of(text)
    figures = {
        "lost": num_groups * GROUP_SIZE - len(outcome.trained),
        "wrong": wrong,
        "trained_twice": outcome.num_trained_twice,
        "dead_letters": len(outcome.dead_letters),
    }
    holds = not any(figures.values()) and max(seconds) < _GIVEN_UP_S
    shown = {"kills": len(victims), "restart_max_s": max(seconds), "samples": len(outcome.trained)}
    return conclude("services", holds, **shown, **figures)


def kill(name: str) -> float:
    """Kill a service; returns the seconds until another process of it was healthy, at most 30."""
    before, token_file = _record(name), this_home().token_file
    process = find(before)
    if process is not None:
        process.kill()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < _GIVEN_UP_S:
        now = _record(name)
        if now.pid != before.pid and is_healthy(now, token_file):
            break
        time.sleep(_POLL_S)
    print(f"services: killed the {name}; healthy again after {passed:.1f} s", flush=True)
    return passed


def _record(name: str) -> ProcessRecord:
    return next(record for record in read_cluster().processes if record.name == name)


if __name__ == "__main__":
    sys.exit(main())
