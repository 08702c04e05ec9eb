"""Weight pushes to four servers, one of which is killed, stopped, slowed or cut off in the middle of every fifth.

    python -m tests.chaos.push_faults [--seed N] [--pushes N] [--vllm N [--way WAY]] [--short]

The real pusher, over gloo, with a group for each server and, beside it, with one group for all (NCCL's shape). Servers
are processes with the product's weight verbs and a memory of weights; each token tells the version that it is said to
be of and a number of the memory that wrote it. Faults meet any state of a push, from joining to the call to serve.
A server that was killed is started again at once, one that was stopped goes on, a link that was cut is joined when the
struck push has ended and the others write. Links are cut where this machine can make network namespaces.
--vllm N: nothing of that, but N faults on two servers of real vLLM with a group each; one of the two, or its engine's
process, is killed, stopped or cut off, and what a server computes tells which weights wrote its tokens. A victim's
start, which engine_start_s tells, is not counted into the time that it is away. WAY: how they receive, second_copy
(the default) or in_place.
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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from tests.chaos.rig.pushed_fleet import DEADLINE_S, FAR, NAMES, Seen, link_cut, pushed_fleet
from tests.chaos.rig.server_nursery import STATES, Fault
from tests.chaos.rig.two_hosts import TwoHosts, two_hosts, why_impossible
from tests.chaos.rig.verdict import conclude, options

T = TypeVar("T")
_FAULT_EVERY = 5
_SHAPES = {"a group each": False, "one group": True}
_OTHERS_LIMIT_S = 5.0
_BACK_LIMIT_S = 60.0
_MARGIN_S = 3.0
_fork = multiprocessing.get_context("fork")


def main() -> int:
    arguments = options(__doc__, {"pushes": 2 * _FAULT_EVERY}, pushes=300, vllm=0, way="second_copy")
    if arguments.vllm:
        return _strike_vllm(arguments.vllm, arguments.seed, arguments.way)
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


def _conclude(
    outcomes: list[tuple[Seen, int, int]], num_faults: int, has_hosts: bool, engine_start_s: float | None = None
) -> int:
    num_shapes = len(_SHAPES) if engine_start_s is None else 1
    unexpected = sum(len(seen.unexpected) for seen, *_ in outcomes)
    wrong = sum(num_wrong for *_, num_wrong in outcomes)
    longest_push_s = max((seen.longest_push_s for seen, *_ in outcomes), default=0.0)
    others_s = max((max(seen.others_s) for seen, *_ in outcomes), default=0.0)
    back_s = max((max(seen.back_s) for seen, *_ in outcomes), default=0.0)
    faults = sum(seen.faults for seen, *_ in outcomes)
    holds = (
        len(outcomes) == num_shapes
        and faults == num_faults * num_shapes
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
        **({} if engine_start_s is None else {"engine_start_s": engine_start_s}),
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
            _tell(shape, number, victim, fault, fleet.seen)
        for why in fleet.seen.unexpected:
            print(f"push_faults: {shape}: unexpected: {why}", flush=True)
        pipe.send((fleet.seen, fleet.watch.num_tokens, fleet.watch.num_wrong))


def _tell(shape: str, number: int, victim: str, fault: Fault, seen: Seen) -> None:
    print(
        f"push_faults: {shape}: push {number}: {victim}'s {fault.of} {fault.kind} at {fault.state}: "
        f"others after {seen.others_s[-1]:.1f} s, back after {seen.back_s[-1]:.1f} s",
        flush=True,
    )


def _strike_vllm(num_faults: int, seed: int, way: str) -> int:
    # Not above: the servers of the other form are forked from a process without torch's threads.
    from tests.chaos.rig.vllm_fleet import NAMES as VLLM_NAMES
    from tests.chaos.rig.vllm_fleet import STATES as VLLM_STATES
    from tests.chaos.rig.vllm_fleet import vllm_fleet
    from tests.chaos.rig.vllm_server import WAYS

    if way not in WAYS:
        sys.exit(f"push_faults: --way {way}: expected one of {', '.join(WAYS)}")
    draw = random.Random(seed)
    has_hosts = why_impossible() is None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(two_hosts()) if has_hosts else None
        kinds = [(kind, of) for of in ("server", "engine") for kind in ("killed", "stopped")]
        kinds += [("cut", "server")] if hosts is not None else []
        # Each order is drawn anew when it is used up: else kinds and states would meet in the same pairs.
        drawn_kinds, drawn_states = (_drawn(draw, each) for each in (kinds, VLLM_STATES))
        fleet = stack.enter_context(vllm_fleet(folder, seed, hosts, way))
        for number in range(num_faults):
            fleet.push_well()
            (kind, of), state = next(drawn_kinds), next(drawn_states)
            victim = FAR if kind == "cut" else draw.choice(VLLM_NAMES)
            cut = link_cut(hosts) if kind == "cut" and hosts is not None else ()
            fleet.push_badly(victim, fault := Fault(kind, state, number, cut=cut, of=of))
            _tell(f"vLLM, {way}", number, victim, fault, fleet.seen)
        for why in fleet.seen.unexpected:
            print(f"push_faults: vLLM: unexpected: {why}", flush=True)
        start_s = max(fleet.nursery.start_s)
        return _conclude([(fleet.seen, fleet.watch.num_tokens, fleet.watch.num_wrong)], num_faults, has_hosts, start_s)


def _drawn(draw: random.Random, each: Sequence[T]) -> Iterator[T]:
    while True:
        yield from draw.sample(each, len(each))


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
