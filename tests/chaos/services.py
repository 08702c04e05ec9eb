"""Retriever and reward service killed ten times each in a run: the keeper has them back within 10 s, nothing is lost.

    deploy/start_cluster.sh && .venv/bin/python -m tests.chaos.services [--seed N]
    python -m tests.chaos.services --short [--seed N]

One quick start on the cluster that runs here, real vLLM and DeepSpeed; between its steps the node's retriever and its
reward server are hit by SIGKILL, in an order that is drawn. holds: each is healthy again at most 10 s later
(restart_max_s); the run exits with 0 and passes `learner.audit`. Minutes. `--short`: two kills of each, without a
cluster: a keeper in this process, the bundled services, and a run with real coordinator, sockets, sessions and clients
around a scripted engine (`tests.chaos.rig.neighbours`); holds: each is healthy again at most 30 s later, since the
machine may be busy; every sample is trained once, with the passage and the reward of its own text (lost=0 wrong=0
trained_twice=0 dead_letters=0).
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
from learner import audit
from protocol.node.home import ProcessRecord, read_cluster
from tests.chaos.quickstart_kills import QuickstartRun
from tests.chaos.rig.kept_services import kept_services, passage_of, play_against, reward_of
from tests.chaos.rig.neighbours import GROUP_SIZE, GROUPS_PER_STEP
from tests.chaos.rig.verdict import conclude, options

_NAMES = ("retriever", "reward")
_LIMIT_S = 10.0
_GIVEN_UP_S = 30.0
_POLL_S = 0.05
_NUM_STEPS = 40
_TURNS = re.compile(r"<search>(.*?)</search><information>(.*?)</information>", flags=re.DOTALL)


def main() -> int:
    arguments = options(__doc__ or "")
    draw = random.Random(arguments.seed)
    victims = [name for name in _NAMES for _ in range(2 if arguments.short else 10)]
    draw.shuffle(victims)
    return _short(victims, draw) if arguments.short else _whole(victims, draw, arguments.seed)


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


def _short(victims: list[str], draw: random.Random) -> int:
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


def _whole(victims: list[str], draw: random.Random, seed: int) -> int:
    seconds: list[float] = []
    at = sorted(draw.uniform(1, _NUM_STEPS - 6) for _ in victims)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        run = QuickstartRun(folder, _NUM_STEPS, seed)
        try:
            for step, victim in zip(at, victims, strict=True):
                run.wait(lambda step=step: run.step >= int(step))  # type: ignore[misc]
                seconds.append(kill(victim))
            run.wait(lambda: run.process.poll() is not None)
        finally:
            run.end()
        has_audit_passed = audit.main([str(folder)]) == 0
        last_step = run.step
    holds = run.process.returncode == 0 and has_audit_passed and max(seconds) <= _LIMIT_S
    return conclude(
        "services",
        holds,
        kills=len(victims),
        restart_max_s=max(seconds),
        steps=last_step,
        exit_status=run.process.returncode,
        audit="passed" if has_audit_passed else "failed",
    )


if __name__ == "__main__":
    sys.exit(main())
