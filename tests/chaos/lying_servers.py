"""Servers of real vLLM that say they have the weights and have others: each is caught before a token of it is trained.

    python -m tests.chaos.lying_servers [--seed N] [--pushes N] [--small] [--short]

A plain model of 3.4M parameters steps at random and is pushed by a rank's own pusher to two rollout servers, processes
of their own of which turns are asked all the time. One of them, or both, lie by one of the ways of
`tests.chaos.rig.loading_lies`, keep what they cached of older weights, or commit without loading; a server of two
tensor-parallel workers has one that loads nothing. Each lie is told after a step of 1e-2, with --small also after one
of 1e-6; the liar answers the probe only once a turn that has tokens of the lie has ended in its engine.
What arrives damaged is refused by name too: a flipped bit, a missing, renamed or misshapen parameter, a stale version.
--short: two lies on one server.

holds: every lie after a large step is found by what the server computes, its server is named, and tokens of every lie
are written and none is in a finished turn; who is lied to by nobody is served, and ends turns; 1,000 honest pushes
raise no alarm; each damage is refused by its name; a push that is looked after takes at most 30 ms more than one that
is not, of which there are two after every eighth (medians; the first of the two is not counted: servers begin to answer
what they were asked after the push before).
caught_small: of lies after small steps, for which nothing is promised.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.chaos.rig.damages import DAMAGES, damaged
from tests.chaos.rig.loading_lies import LIES
from tests.chaos.rig.lying_pair import LyingPair, lying_pair
from tests.chaos.rig.lying_server import OWN_LIES, PRETENDS
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import make_tiny_model

LARGE, SMALL = 1e-2, 1e-6
_OF_WORKERS = "one_shard_left"
_ALL_WRONG = "all_equally_wrong"
_BACK_LIMIT = 20
_CHECK_LIMIT_S = 0.030
_BLIND_EVERY = 8
# A server that fails in any other way was not found to lie.
_FOUND_BY = ("computes other logprobs than the learner after the push", "cached under other weights")


@dataclass
class Tally:
    """What became of the lies and of honest pushes."""

    told: int = 0
    caught: int = 0
    caught_small: int = 0
    false_alarms: int = 0
    honest: int = 0
    not_back: int = 0  # liars that were not served by good pushes afterwards
    refused: int = 0  # damages, by their name
    unwritten: int = 0  # lies of which no turn that ended has a token: nothing could have been trained
    written_lies: int = 0  # tokens of turns that ended in an engine, with a version which its server lied about
    trained_lies: int = 0  # those of them that a conversation was given
    trained: int = 0  # tokens that conversations were given
    push_s: dict[bool, list[float]] = field(default_factory=dict)  # of honest pushes, looked after or not


def main() -> int:
    arguments = options(__doc__ or "", {"pushes": _BLIND_EVERY}, pushes=1000, small=False)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), tied=True, hidden_size=256, num_layers=4, width=0.05)
        steps = (LARGE, SMALL) if arguments.small else (LARGE,)
        _run(model, tally, random.Random(arguments.seed), arguments.pushes, arguments.short, steps)
    num_damages = 0 if arguments.short else len(DAMAGES)
    looked_s, blind_s = (statistics.median(tally.push_s.get(is_looked, [0.0])) for is_looked in (True, False))
    check_ms = 1000 * (looked_s - blind_s)
    holds = (
        tally.caught == tally.told
        and not tally.unwritten
        and not tally.trained_lies
        and not tally.false_alarms
        and not tally.not_back
        and tally.refused == num_damages
        and (check_ms <= 1000 * _CHECK_LIMIT_S or arguments.short)
    )
    return conclude(
        "lying_servers",
        holds,
        lies=tally.told,
        caught=tally.caught,
        caught_small=tally.caught_small,
        unwritten=tally.unwritten,
        written_lies=tally.written_lies,
        trained_lies=tally.trained_lies,
        trained=tally.trained,
        damages_refused=tally.refused,
        honest_pushes=tally.honest,
        false_alarms=tally.false_alarms,
        not_back=tally.not_back,
        push_ms=1000 * looked_s,
        check_ms=check_ms,
    )


def _run(
    model: Path, tally: Tally, draw: random.Random, num_pushes: int, is_short: bool, steps: Sequence[float]
) -> None:
    lies = ["half_loaded", OWN_LIES[0]] if is_short else [*(name for name in LIES if name != _OF_WORKERS), *_SPECIAL]
    with lying_pair(model, 1 if is_short else 2, 1) as pair:
        _tell_all(pair, tally, draw, lies, steps)
        if not is_short:
            for name in DAMAGES:
                _damage(pair, tally, name)
            pair.push_s = {True: [], False: []}
            _be_honest(pair, tally, draw, num_pushes)
            tally.push_s = pair.push_s
            pair.await_turns()
    if not is_short:
        with lying_pair(model, 1, 2) as pair:
            _tell_all(pair, tally, draw, [_OF_WORKERS], steps)


def _tell_all(pair: LyingPair, tally: Tally, draw: random.Random, lies: Sequence[str], steps: Sequence[float]) -> None:
    _be_honest(pair, tally, draw, 3)
    pair.await_turns()
    lied: set[tuple[str, int]] = set()
    for name in lies:
        for step in steps:
            lied |= _tell(pair, tally, name, step)
    written, finished = pair.counted()
    tally.written_lies += sum(written[key] for key in lied)
    tally.trained_lies += sum(finished[key] for key in lied)
    tally.trained += sum(finished.values())


def _be_honest(pair: LyingPair, tally: Tally, draw: random.Random, number: int) -> None:
    for done in range(1, number + 1):
        report = pair.push(10 ** draw.uniform(-6, -2))
        tally.honest += 1
        tally.false_alarms += bool(report.failed)
        if report.failed:
            print(f"lying_servers: an honest push failed: {report.failed}", flush=True)
        if not done % _BLIND_EVERY:
            for _ in range(2):
                pair.push(10 ** draw.uniform(-6, -2), is_looked_after=False)
            del pair.push_s[False][-2]


def _tell(pair: LyingPair, tally: Tally, name: str, step: float) -> set[tuple[str, int]]:
    """Push while the last server lies, or all do; then push honestly until all are served.

    Returns who was caught, with which version.
    """
    liars = pair.servers if name == _ALL_WRONG else pair.servers[-1:]
    honest = {server.name for server in pair.servers} - {liar.name for liar in liars}
    for liar in liars:
        pair.lie(liar, "scaled" if name == _ALL_WRONG else name)
    if name == "old_cache":  # what the next push's probe must not find
        pair.push(step)
    report = pair.push(step)
    for liar in liars:
        pair.lie(liar, None)
    caught = {(liar.name, pair.version) for liar in liars if _is_found(report.failed.get(liar.name, ""), liar.name)}
    is_caught = len(caught) == len(liars) and honest.issubset(report.synced)
    if step == LARGE:
        tally.told += 1
        tally.caught += is_caught
    else:
        tally.caught_small += is_caught
    if name != PRETENDS:  # what it writes then is of the version before, and says so
        written = pair.counted()[0]
        tally.unwritten += not all(written[key] for key in caught)
    print(f"lying_servers: {name} after {step:g}: {report.failed or 'not caught'}", flush=True)
    _recover(pair, tally)
    pair.await_turns()
    return caught


def _is_found(said: str, liar: str) -> bool:
    return liar in said and any(words in said for words in _FOUND_BY)


def _recover(pair: LyingPair, tally: Tally) -> None:
    for _ in range(_BACK_LIMIT):
        if not pair.push(LARGE).failed:
            return
    tally.not_back += 1


def _damage(pair: LyingPair, tally: Tally, name: str) -> None:
    """Push what does not arrive as it should: every server says so by its name, and takes the next good push."""
    expected = DAMAGES[name]
    pair.await_joined()
    with damaged(pair, name):
        report = pair.push(LARGE, by=-3 if name == "stale_version" else 1)
    is_refused = bool(report.failed) and not report.synced and all(expected in why for why in report.failed.values())
    tally.refused += is_refused
    print(f"lying_servers: {name}: {report.failed or 'not refused'}", flush=True)
    pair.version += 3
    _recover(pair, tally)


_SPECIAL: Sequence[str] = (*OWN_LIES, _ALL_WRONG)


if __name__ == "__main__":
    sys.exit(main())
