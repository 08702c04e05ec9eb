"""Servers of real vLLM that say they have the weights and have others: each is caught before a token of it is trained.

    python -m tests.chaos.lying_servers [--seed N] [--pushes N] [--small] [--short]

A plain model of 3.4M parameters steps at random and is pushed by a rank's own pusher to two rollout servers, of which
turns are asked all the time. One of them, or both, lie by one of the ways of `tests.chaos.rig.loading_lies`, keep what
they cached of older weights, or commit without loading; a server of two tensor-parallel workers has one that loads
nothing. Each lie is told after a step of 1e-2, with --small also after one of 1e-6.
What arrives damaged is refused by name too: a flipped bit, a missing, renamed or misshapen parameter, a stale version.
--short: two lies on one server.

holds: every lie after a large step is caught, its server is named, and no finished turn has a token of it; who is
lied to by nobody is served; 1,000 honest pushes raise no alarm; each damage is refused by its name; a push that is
looked after takes at most 30 ms more than one that is not, of which there is one after every fourth (medians).
caught_small: of lies after small steps, for which nothing is promised.
"""

import asyncio
import os
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
from tests.chaos.rig.lying_pair import LyingPair, LyingServer, start_pair
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import make_tiny_model

LARGE, SMALL = 1e-2, 1e-6
_OF_WORKERS = "one_shard_left"
_ALL_WRONG = "all_equally_wrong"
_BACK_LIMIT = 20
_CHECK_LIMIT_S = 0.030
_BLIND_EVERY = 4


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
    trained_lies: int = 0  # tokens of finished turns that carry a version which its server lied about
    lied: set[tuple[str, int]] = field(default_factory=set)
    push_s: dict[bool, list[float]] = field(default_factory=dict)  # of honest pushes, looked after or not


def main() -> int:
    arguments = options(__doc__ or "", pushes=1000, small=False)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # two engines
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder), tied=True, hidden_size=256, num_layers=4, width=0.05)
        steps = (LARGE, SMALL) if arguments.small else (LARGE,)
        asyncio.run(_run(model, tally, random.Random(arguments.seed), arguments.pushes, arguments.short, steps))
    num_damages = 0 if arguments.short else len(DAMAGES)
    looked_s, blind_s = (statistics.median(tally.push_s.get(is_looked, [0.0])) for is_looked in (True, False))
    check_ms = 1000 * (looked_s - blind_s)
    holds = (
        tally.caught == tally.told
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
        trained_lies=tally.trained_lies,
        damages_refused=tally.refused,
        honest_pushes=tally.honest,
        false_alarms=tally.false_alarms,
        not_back=tally.not_back,
        push_ms=1000 * looked_s,
        check_ms=check_ms,
    )


async def _run(
    model: Path, tally: Tally, draw: random.Random, num_pushes: int, is_short: bool, steps: Sequence[float]
) -> None:
    pair = await start_pair(model, 1 if is_short else 2, 1)
    pair.ask_for_ever(4)
    await _be_honest(pair, tally, draw, 3)
    lies = ["half_loaded", "old_cache"] if is_short else [*(name for name in LIES if name != _OF_WORKERS), *_SPECIAL]
    for name in lies:
        for step in steps:
            await _tell(pair, tally, name, step)
    if not is_short:
        for name in DAMAGES:
            await _damage(pair, tally, name)
        pair.push_s = {True: [], False: []}
        await _be_honest(pair, tally, draw, num_pushes)
        tally.push_s = pair.push_s
    await _close(pair, tally)
    if not is_short:
        pair = await start_pair(model, 1, 2)
        pair.ask_for_ever(4)
        await _be_honest(pair, tally, draw, 3)
        for step in steps:
            await _tell(pair, tally, _OF_WORKERS, step)
        await _close(pair, tally)


async def _close(pair: LyingPair, tally: Tally) -> None:
    await pair.close()
    tally.trained_lies += sum(number for key, number in pair.written.items() if key in tally.lied)
    tally.lied.clear()
    written, lies = sum(pair.written.values()), tally.trained_lies
    print(f"lying_servers: {written} tokens of finished turns, {lies} of lies", flush=True)


async def _be_honest(pair: LyingPair, tally: Tally, draw: random.Random, number: int) -> None:
    for done in range(1, number + 1):
        report = await pair.push(10 ** draw.uniform(-6, -2))
        tally.honest += 1
        tally.false_alarms += bool(report.failed)
        if report.failed:
            print(f"lying_servers: an honest push failed: {report.failed}", flush=True)
        if not done % _BLIND_EVERY:
            await pair.push(10 ** draw.uniform(-6, -2), is_looked_after=False)


async def _tell(pair: LyingPair, tally: Tally, name: str, step: float) -> None:
    """Push while the last server lies, or all do; then push honestly until all are served."""
    liars = pair.servers if name == _ALL_WRONG else pair.servers[-1:]
    honest = {server.name for server in pair.servers} - {liar.name for liar in liars}
    for liar in liars:
        await _lie(liar, name)
    if name == "old_cache":  # what the next push's probe must not find
        await pair.push(step)
    report = await pair.push(step)
    for liar in liars:
        await _be_true(liar, name)
    named = {liar.name for liar in liars if liar.name in report.failed.get(liar.name, "")}
    is_caught = named == {liar.name for liar in liars} and honest.issubset(report.synced)
    if step == LARGE:
        tally.told += 1
        tally.caught += is_caught
    else:
        tally.caught_small += is_caught
    if is_caught:
        tally.lied |= {(liar.name, pair.version) for liar in liars}
    print(f"lying_servers: {name} after {step:g}: {report.failed or 'not caught'}", flush=True)
    await _recover(pair, tally)


async def _recover(pair: LyingPair, tally: Tally) -> None:
    for _ in range(_BACK_LIMIT):
        if not (await pair.push(LARGE)).failed:
            return
    tally.not_back += 1


async def _lie(liar: LyingServer, name: str) -> None:
    if name == "old_cache":
        liar.engine._cache_salt = lambda: "always the same"  # type: ignore[method-assign]
    elif name == "commit_without_loading":
        liar.pretends = True
    else:
        await liar.lie("scaled" if name == _ALL_WRONG else name)


async def _be_true(liar: LyingServer, name: str) -> None:
    liar.engine.__dict__.pop("_cache_salt", None)
    liar.pretends = False
    await liar.lie(None)


async def _damage(pair: LyingPair, tally: Tally, name: str) -> None:
    """Push what does not arrive as it should: every server says so by its name, and takes the next good push."""
    expected = DAMAGES[name]
    await pair._joined()
    with damaged(pair, name):
        report = await pair.push(LARGE, by=-3 if name == "stale_version" else 1)
    is_refused = not report.synced and all(expected in why for why in report.failed.values())
    tally.refused += is_refused
    print(f"lying_servers: {name}: {report.failed or 'not refused'}", flush=True)
    pair.version += 3
    await _recover(pair, tally)


_SPECIAL: Sequence[str] = ("old_cache", "commit_without_loading", _ALL_WRONG)


if __name__ == "__main__":
    sys.exit(main())
