"""Kills and standstills at each place of a turn, of a rank and a server that share a device: the run always goes on.

    deploy/start_cluster.sh && .venv/bin/python -m tests.chaos.turn_kills [--seed N] [--kills N] [--short]

The quick start's run with `placement.devices: shared`, at staleness 0 and 1, on real vLLM, DeepSpeed and Ray. Its rank
stops at one place of each turn: before the servers are told to sleep (they write), when they are asleep, when the
models are back, when they are parked again (the device is handed over), when the servers are awake, and in the push
when a server has prepared, has received, has committed. There the server, its engine, the coordinator or the rank is
killed, or stands still for 3 to 12 s; every other time it is so a drawn moment after the place was left. A command that
ends with an error is given again. All eight places at both are met by 32 strikes (the default), half an hour on two
cores. `--short`: two strikes at one place of each staleness. Not part of CI: minutes.

holds: after every strike two more steps are trained within 5 minutes; the command ends with 0 within 3 minutes of being
told to; `learner.audit` passes; no sample is older than it may be; the learner finds the logprob of every token that
says it is of its own version as the sampler did, so that none is of other weights: at staleness 0 of all tokens, one by
one, at staleness 1 of those of a step together (fresh_steps: how many steps had any).
"""

import itertools
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from learner import audit
from tests.chaos.rig.turn_run import PLACES, VICTIMS, Strike, TurnRun
from tests.chaos.rig.verdict import conclude, options

_TOLERANCE = 1e-3  # nats; weights of another step differ by a hundred times as much
_FRESH_KL = 1e-6  # of a token; a billionth is seen of the right weights, two thousandths of those of a step before
_STALENESS = (0, 1)
_STANDSTILL_S = (3.0, 12.0)
_LONGEST_DELAY_S = 0.3
_STRIKES_OF_A_RUN = 2  # at the least: a run takes longer to start and to end than to be struck


@dataclass
class _Seen:
    """What the runs came to."""

    strikes: int = 0
    starts: int = 0  # commands that were given
    longest_s: float = 0.0  # from a strike to the second step after it
    logprob_difference: float = 0.0  # largest at staleness 0, in nats
    fresh_kl: float = 0.0  # largest of a step at staleness 1, of the tokens that say they are of the learner's version
    fresh_steps: int = 0
    audits: int = 0  # that passed
    problems: list[str] = field(default_factory=list)


def main() -> int:
    arguments = options(__doc__, kills=32)
    draw = random.Random(arguments.seed)
    planned = _planned(draw, 4 if arguments.short else arguments.kills, is_short=arguments.short)
    seen = _Seen()
    with tempfile.TemporaryDirectory() as name:
        for number, (place, staleness, strikes) in enumerate(planned):
            _strike_in(Path(name) / f"run-{number}", place, staleness, strikes, arguments.seed, seen)
    for problem in seen.problems:
        print(f"turn_kills: {problem}", flush=True)
    return conclude(
        "turn_kills",
        not seen.problems and seen.strikes == sum(len(strikes) for *_, strikes in planned),
        strikes=seen.strikes,
        places=len({place for place, *_ in planned}),
        runs=len(planned),
        starts=seen.starts,
        longest_s=seen.longest_s,
        logprob_difference=seen.logprob_difference,
        fresh_kl=seen.fresh_kl,
        fresh_steps=seen.fresh_steps,
        audits_passed=seen.audits,
        problems=len(seen.problems),
    )


def _planned(draw: random.Random, number: int, *, is_short: bool) -> list[tuple[str, int, list[Strike]]]:
    """Return the strikes of each run, of two or more: every victim and kind as often as any other."""
    places = draw.sample(PLACES, 1 if is_short else len(PLACES))
    runs: list[tuple[str, int, list[Strike]]] = [(place, each, []) for place in places for each in _STALENESS]
    draw.shuffle(runs)
    runs = runs[: max(1, number // _STRIKES_OF_A_RUN)]
    kinds = itertools.cycle(draw.sample(list(itertools.product(VICTIMS, (True, False))), 2 * len(VICTIMS)))
    for index in range(number):
        victim, is_kill = next(kinds)
        delay_s = draw.uniform(0.01, _LONGEST_DELAY_S) if draw.random() < 0.5 else 0.0
        runs[index % len(runs)][2].append(Strike(victim, is_kill, delay_s, draw.uniform(*_STANDSTILL_S)))
    return runs


def _strike_in(folder: Path, place: str, staleness: int, strikes: Sequence[Strike], seed: int, seen: _Seen) -> None:
    run = TurnRun(folder, place, staleness, seed)
    where = f"staleness {staleness}, {place}"
    try:
        for strike in strikes:
            took_s = run.strike(strike)
            print(f"turn_kills: {where}: {strike}: went on after {took_s:.1f} s", flush=True)
            seen.strikes += 1
            seen.longest_s = max(seen.longest_s, took_s)
        if (status := run.end()) != 0:
            seen.problems.append(f"{where}: the command ended with {status}")
    except (TimeoutError, RuntimeError) as error:
        seen.problems.append(f"{where}: {error}")
        run.kill()
    seen.starts += run.num_starts
    seen.problems += _problems(run, staleness, where, seen)


def _problems(run: TurnRun, staleness: int, where: str, seen: _Seen) -> list[str]:
    lines = run.lines()
    problems = []
    if audit.main([str(run.folder)]) == 0:
        seen.audits += 1
    else:
        problems.append(f"{where}: the audit does not hold")
    if any(line["data/staleness_max"] > staleness for line in lines):
        problems.append(f"{where}: samples were older than {staleness}")
    if not any(line["policy/grad_norm"] > 0.0 for line in lines):
        problems.append(f"{where}: no step changed the weights, so that all versions are one")
    if staleness == 0 and lines:
        difference = max(line["policy/logprob_difference_max"] for line in lines)
        seen.logprob_difference = max(seen.logprob_difference, difference)
        if not difference <= _TOLERANCE:
            problems.append(f"{where}: logprobs differ from the learner's by up to {difference:.2g} nats")
    return problems + (_problems_of_fresh(lines, where, seen) if staleness else [])


def _problems_of_fresh(lines: Sequence[Mapping[str, float]], where: str, seen: _Seen) -> list[str]:
    found = [abs(line["policy/kl_fresh"]) for line in lines if "policy/kl_fresh" in line]
    seen.fresh_steps += len(found)
    seen.fresh_kl = max([seen.fresh_kl, *found])
    if all(kl <= _FRESH_KL for kl in found):
        return []
    return [f"{where}: tokens of the learner's own version are of other weights: a KL of {max(found):.2g} in a step"]


if __name__ == "__main__":
    sys.exit(main())
