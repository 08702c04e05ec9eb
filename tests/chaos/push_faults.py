"""Weight pushes to four servers, one of which is killed, stopped, slowed or cut off in the middle of every fifth.

    python -m tests.chaos.push_faults [--seed N] [--pushes N] [--short]

The real pusher, over gloo, with a group for each server and, beside it, with one group for all (NCCL's shape). Servers
are processes with the product's weight verbs and a memory of weights; each token tells the version that it is said to
be of and a number of the memory that wrote it. Faults meet any state of a push, from joining to the call to serve.
A server that was killed is started again at once, one that was stopped goes on, a link that was cut is joined when the
struck push has ended and the others write. Links are cut where this machine can make network namespaces.
--short: eight pushes in each shape, four of them struck.

holds: every push ends within its deadline; 5 s later at the latest all other servers hold its weights and write; no
token is of other weights than its version's; the victim is back within 60 s by itself; no other server fails.
"""

import contextlib
import math
import multiprocessing
import random
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.chaos.rig.pushed_fleet import DEADLINE_S, FAR, NAMES, Seen, link_cut, pushed_fleet
from tests.chaos.rig.server_nursery import STATES, Fault
from tests.chaos.rig.two_hosts import TwoHosts, two_hosts, why_impossible
from tests.chaos.rig.verdict import conclude, options

_FAULT_EVERY = 5
_SHAPES = {"a group each": False, "one group": True}
_OTHERS_LIMIT_S = 5.0
_BACK_LIMIT_S = 60.0
_MARGIN_S = 3.0
_fork = multiprocessing.get_context("fork")


def main() -> int:
    arguments = options(__doc__, {"pushes": 2 * _FAULT_EVERY}, pushes=300)
    num_pushes, num_faults = (8, 4) if arguments.short else (arguments.pushes, arguments.pushes // _FAULT_EVERY)
    has_hosts = why_impossible() is None
    running = []
    for number, shape in enumerate(_SHAPES):
        ours, theirs = _fork.Pipe()
        given = (theirs, shape, arguments.seed + number, num_pushes, num_faults, has_hosts)
        process = _fork.Process(target=_push_in_shape, args=given)
        process.start()
        theirs.close()
        running.append((shape, ours, process))
    outcomes: list[tuple[Seen, int, int]] = []
    for shape, pipe, process in running:
        try:
            outcomes.append(pipe.recv())
        except EOFError:
            print(f"push_faults: {shape}: it ended without an outcome", flush=True)
        process.join(30.0)
    return _conclude(outcomes, num_faults, has_hosts)


def _conclude(outcomes: list[tuple[Seen, int, int]], num_faults: int, has_hosts: bool) -> int:
    unexpected = sum(len(seen.unexpected) for seen, *_ in outcomes)
    wrong = sum(num_wrong for *_, num_wrong in outcomes)
    longest_push_s = max((seen.longest_push_s for seen, *_ in outcomes), default=0.0)
    others_s = max((max(seen.others_s) for seen, *_ in outcomes), default=0.0)
    back_s = max((max(seen.back_s) for seen, *_ in outcomes), default=0.0)
    faults = sum(seen.faults for seen, *_ in outcomes)
    holds = (
        len(outcomes) == len(_SHAPES)
        and faults == num_faults * len(_SHAPES)
        and not unexpected
        and not wrong
        and longest_push_s <= DEADLINE_S + _MARGIN_S
        and others_s <= _OTHERS_LIMIT_S
        and back_s <= _BACK_LIMIT_S
    )
    return conclude(
        "push_faults",
        holds,
        pushes=sum(seen.pushes for seen, *_ in outcomes),
        faults=faults,
        cut="links" if has_hosts else "none",
        unexpected_failures=unexpected,
        wrong_tokens=wrong,
        tokens=sum(num_tokens for _, num_tokens, _ in outcomes),
        longest_push_s=longest_push_s,
        others_after_s=others_s,
        back_after_s=back_s,
    )


def _push_in_shape(pipe: Connection, shape: str, seed: int, num_pushes: int, num_faults: int, has_hosts: bool) -> None:
    draw = random.Random(seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(two_hosts()) if has_hosts else None
        planned = _planned(draw, num_pushes, num_faults, hosts)
        fleet = stack.enter_context(pushed_fleet(_SHAPES[shape], folder, seed, hosts))
        for number in range(num_pushes):
            if (struck := planned.get(number)) is None:
                fleet.push_well()
                continue
            victim, fault = struck
            fleet.push_badly(victim, fault)
            print(
                f"push_faults: {shape}: push {number}: {victim} {fault.kind} at {fault.state}: others after "
                f"{fleet.seen.others_s[-1]:.1f} s, back after {fleet.seen.back_s[-1]:.1f} s",
                flush=True,
            )
        for why in fleet.seen.unexpected:
            print(f"push_faults: {shape}: unexpected: {why}", flush=True)
        pipe.send((fleet.seen, fleet.watch.num_tokens, fleet.watch.num_wrong))


def _planned(
    draw: random.Random, num_pushes: int, num_faults: int, hosts: TwoHosts | None
) -> dict[int, tuple[str, Fault]]:
    """Return who is struck by what in which push: each kind as often as any other, in each state."""
    kinds = ["killed", "stopped", "slowed", *(["cut"] if hosts is not None else [])]
    states = draw.sample(STATES, len(STATES))
    planned = {}
    for number, push in enumerate(sorted(draw.sample(range(1, num_pushes), num_faults))):
        kind = kinds[number % len(kinds)]
        # By one further in every round of the kinds, so that each kind meets each state.
        state = states[(number + number // math.lcm(len(kinds), len(states))) % len(states)]
        victim = FAR if kind == "cut" else draw.choice(NAMES)
        delay_s = draw.uniform(0.1, 0.2 if num_faults < len(STATES) else 1.25) * DEADLINE_S
        cut = link_cut(hosts) if kind == "cut" and hosts is not None else ()
        planned[push] = victim, Fault(kind, state, number, delay_s, cut)
    return planned


if __name__ == "__main__":
    sys.exit(main())
