"""A run among faults for as long as one likes: whatever can die, stand still or fill up does so, drawn by a seed.

    deploy/start_cluster.sh && .venv/bin/python -m tests.chaos.soak [--seed N] [--minutes 30] [--kills] [--short]

The quick start's run with two rollout servers on the cluster that runs here, twice: a quarter of the time undisturbed,
then among faults. SIGKILL or SIGSTOP hits a rollout server, its engine, the coordinator, a rank, the fleet, the keeper,
the retriever or the reward server; SIGKILL hits Ray's own process of this node; where root may mount, the run's disk is
full for 20 s. When the command ends with an error it is given again after `start_cluster.sh`, as its user would.

holds: once the faults are over the run trains three steps within 5 minutes, no step is missing, no prompt was given
up, `learner.audit` passes, the held-out score is at most 0.1 below the undisturbed run's, and no kind of process of
ours has grown by more than 5 % since the tenth minute of its processes. Faults that never came are named; some must
have come. `--kills`: one SIGKILL a minute and nothing else, and it holds only with at least 80 % of the undisturbed
samples a second. `--short`: three minutes, hardly a warm start, without score and memory; not in CI. Links are cut
between hosts, by tests/machines/hosts.sh.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy.node.home import this_home
from learner import audit
from tests.chaos.rig.verdict import conclude, options
from tests.chaos.soak.disk import filled, own_disk
from tests.chaos.soak.findings import Findings, num_given_up
from tests.chaos.soak.memory_growth import MemoryGrowth, say_growth
from tests.chaos.soak.nemesis import Nemesis
from tests.chaos.soak.processes import OURS, RAY, processes
from tests.chaos.soak.soaked_run import GROUP_SIZE, GROUPS_PER_STEP, SoakedRun
from tests.chaos.soak.step_lines import Line, is_whole, score, standstills, steps_per_s

_POLL_S = 0.25
_GROWS_S = 600.0
_RECOVERY_S, _RECOVERY_STEPS = 300.0, 3
_MAX_STARTS = 10  # in a row without a step
# Between faults, in seconds: a run that a rank's death puts back to its checkpoint needs some to get further.
_PAUSE_S, _SHORT_PAUSE_S, _KILLS_PAUSE_S = (10.0, 60.0), (8.0, 20.0), (50.0, 70.0)


@dataclass
class _Watched:
    """What a run was seen to do."""

    rate: float = 0.0  # samples a second, from its first step to the end of the faults
    longest_s: float = 0.0  # between two steps
    has_recovered: bool = True
    lines: list[Line] = field(default_factory=list)
    num_given_up: int = 0  # prompts


def main() -> int:
    arguments = options(__doc__ or "", minutes=30.0, kills=False)
    seconds = 180.0 if arguments.short else 60.0 * arguments.minutes
    growth = MemoryGrowth(_GROWS_S)
    with tempfile.TemporaryDirectory() as name, own_disk(Path(name)) as disk:
        calm = _watch(SoakedRun(Path(name) / "calm", arguments.seed, arguments.short), seconds / 4.0, None, None)
        nemesis = _nemesis(arguments, disk)
        run = SoakedRun((disk or Path(name)) / "run", arguments.seed, arguments.short)
        among = _watch(run, seconds, nemesis, growth)
        has_audit_passed = audit.main([str(run.folder)]) == 0
    for kind, number in sorted(nemesis.begun.items()):
        print(f"soak: {number} x {kind}")
    if nemesis.unmet:
        print(f"soak: never {', '.join(nemesis.unmet)}")
    findings = Findings(
        num_faults=sum(nemesis.begun.values()),
        has_recovered=among.has_recovered,
        is_whole=is_whole(among.lines),
        growth=say_growth(growth),
        goodput=among.rate / calm.rate,
        score=score(among.lines),
        calm_score=score(calm.lines),
        num_given_up=among.num_given_up,
        is_goodput_held=arguments.kills,
    )
    for words in findings.broken():
        print(f"soak: {words}")
    return conclude(
        "soak",
        has_audit_passed and not findings.broken(),
        faults=findings.num_faults,
        starts=run.num_starts,
        steps=len({line["step"] for line in among.lines}),
        given_up=findings.num_given_up,
        goodput=findings.goodput,
        samples_per_s=among.rate,
        longest_standstill_s=among.longest_s,
        recovered="yes" if among.has_recovered else "no",
        growth=findings.worst_growth,
        eval_reward=findings.score,
        calm_eval_reward=findings.calm_score,
        audit="passed" if has_audit_passed else "failed",
    )


def _nemesis(arguments: argparse.Namespace, disk: Path | None) -> Nemesis:
    names = [f"kill {kind}" for kind in OURS]
    if arguments.kills:
        return Nemesis(_processes, names, {}, random.Random(arguments.seed), _KILLS_PAUSE_S)
    names += [f"kill {RAY}", *(f"stop {kind}" for kind in OURS)]
    pause_s = _SHORT_PAUSE_S if arguments.short else _PAUSE_S
    others = {"fill disk": filled(disk)} if disk is not None else {}
    return Nemesis(_processes, names, others, random.Random(arguments.seed), pause_s)


def _watch(run: SoakedRun, seconds: float, nemesis: Nemesis | None, growth: MemoryGrowth | None) -> _Watched:
    """Have a run go on for so long from its first step on, then stop it as Ctrl-C does."""
    try:
        run.await_first_step()
        began, began_at_s = time.monotonic(), time.time()
        starts = _Starts(run)
        while (passed := time.monotonic() - began) < seconds:
            if nemesis is not None and (name := nemesis.poll(passed)) is not None:
                print(f"soak: {passed:6.0f} s  step {run.step}: {name}", flush=True)
            if growth is not None:
                growth.take(passed, _processes)
            if run.has_ended and nemesis is None:
                raise RuntimeError("the undisturbed run ended by itself")
            if run.has_ended and nemesis is not None:
                nemesis.rest()  # whoever gives the command again has made room before
                starts.again()
            time.sleep(_POLL_S)
        watched, ended_at_s = _Watched(), time.time()
        if nemesis is not None:
            nemesis.rest()
            watched.has_recovered = _recovers(run, starts)
    finally:
        if nemesis is not None:
            nemesis.rest()
        run.end()
    watched.lines, watched.num_given_up = run.lines(), num_given_up(run.folder)
    watched.rate = steps_per_s(watched.lines, began_at_s, ended_at_s) * GROUPS_PER_STEP * GROUP_SIZE
    watched.longest_s = max((seconds for _, seconds in standstills(watched.lines, 0.0)), default=0.0)
    return watched


class _Starts:
    """Gives the command again, but not for ever."""

    def __init__(self, run: SoakedRun) -> None:
        self._run = run
        self._at_step = run.step
        self._in_a_row = 0

    def again(self) -> None:
        """Raises: RuntimeError after ten starts in a row without a step."""
        step = self._run.step
        self._in_a_row = 1 if step != self._at_step else self._in_a_row + 1
        self._at_step = step
        if self._in_a_row > _MAX_STARTS:
            raise RuntimeError(f"{_MAX_STARTS} starts without a step beyond {step}")
        print(f"soak: the command ended with {self._run.process.returncode} at step {step}: given again", flush=True)
        self._run.start_again()


def _recovers(run: SoakedRun, starts: _Starts) -> bool:
    """Return whether the run trains again now that nothing disturbs it."""
    until = time.monotonic() + _RECOVERY_S
    first_at_s = time.time()
    while time.monotonic() < until:
        if sum(line["at_s"] > first_at_s for line in run.lines()) >= _RECOVERY_STEPS:
            return True
        if run.has_ended:
            starts.again()
        time.sleep(_POLL_S)
    return False


def _processes() -> Mapping[str, list[psutil.Process]]:
    return processes(this_home())
