"""Runs of the rig in which a process dies at a failpoint of saving, committing, restoring or accounting.

For each failpoint one run of 24 steps with a checkpoint every second one; a process dies
where the failpoint stands, at a pass that is drawn, and the learner is killed once more so that each run also restores.
After every death what `latest` names must verify; at the end the audit and the count of what was trained must hold.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner import audit
from learner.checkpoint.folder import LATEST
from learner.checkpoint.manifest import verify
from learner.disk.run_folder import CHECKPOINTS
from protocol.node.home import Keys
from tests.chaos.rig.counting import count_trained
from tests.chaos.rig.processes import Pace
from tests.chaos.rig.run import Rig
from tests.chaos.rig.settings import reward_service, rig_home, rig_settings

# Passed in every turn of the coordinator, or once a step; the others once a checkpoint or once a start.
_OFTEN = {"ledger.commit.before": 60, "ledger.commit.after": 60}
_EACH_STEP = ("step_book.", "run_record.")
_KILL_AT_STEP = 13
# Passed only by a start that finds no checkpoint, and by a step that is saved again: the last one, once a run.
_BEFORE_ANY_CHECKPOINT = ("run_folder.record_set_aside",)
_SAVED_AGAIN = ("checkpoint.commit.latest_taken_off", "checkpoint.commit.displaced")


@dataclass(frozen=True)
class CrashOutcome:
    """setting: what SLUICE_FAILPOINT was. problems: what the run did not recover from, none when it is well."""

    setting: str
    deaths: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "FAIL" if self.problems else "ok  "
        return " ".join([verdict, self.setting, f"deaths={self.deaths}", "; ".join(self.problems)]).rstrip()


class _Once:
    """Kills the learner at a step, once, so that a run has something to restore."""

    def __init__(self, failpoint: str) -> None:
        self.is_done = False
        self._at_step = 1 if failpoint in _BEFORE_ANY_CHECKPOINT else _KILL_AT_STEP

    def __call__(self, rig: Rig, now: float) -> None:
        if not self.is_done and rig.step >= self._at_step and rig.learner is not None:
            rig.learner.kill()
            self.is_done = True


class _Witness:
    """Counts deaths, disarms the failpoint after the first that the rig did not cause, and looks at `latest`."""

    def __init__(self, rig: Rig, killer: _Once) -> None:
        self.num_deaths = 0
        self.has_fired = False
        self.broken: list[str] = []
        self._rig = rig
        self._killer = killer
        self._num_killed = 0

    def __call__(self, name: str) -> None:
        self.num_deaths += 1
        if self._killer.is_done and not self._num_killed:
            self._num_killed = 1
        else:
            self.has_fired = True
            self._rig.failpoint = None
        latest = self._rig.folder / CHECKPOINTS / LATEST
        if latest.is_symlink():
            try:
                verify(latest.resolve())
            except Exception as error:
                self.broken.append(f"after the death of {name}: {error}")


def crash_in_rig(folder: Path, failpoints: Sequence[str], seed: int) -> Iterator[CrashOutcome]:
    """Yield what became of each failpoint's run, as it ends."""
    draw = random.Random(seed)
    with rig_home(folder) as keys, reward_service(folder) as url:
        for number, failpoint in enumerate(failpoints):
            place = folder / str(number)
            place.mkdir()
            yield _crash(place, f"{failpoint}:kill@{_pass(failpoint, draw)}", url, keys, seed)


def _crash(folder: Path, setting: str, reward_url: str, keys: Keys, seed: int) -> CrashOutcome:
    settings = rig_settings(
        folder,
        reward_url,
        num_prompts=96,
        epochs=1,
        seed=seed,
        learner={"groups_per_step": 4, "max_staleness": 1, "checkpoint_every_steps": 2},
        rollout={"group_size": 2},
    )
    killer = _Once(setting.partition(":")[0])
    rig = Rig(settings, keys, num_servers=2, pace=Pace(seed, mean_tokens=20.0), disturb=killer)
    witness = rig.on_death = _Witness(rig, killer)
    rig.failpoint = setting
    rig.run(limit_s=120.0)
    lost, twice, partial = count_trained(rig.folder, settings, epochs=1)
    problems = [] if witness.has_fired else ["nothing died there"]
    problems += witness.broken
    problems += [f"lost={lost} trained_twice={twice} partial={partial}"] if lost or twice or partial else []
    problems += [] if audit.audit_run_folder(rig.folder).holds else ["the audit does not hold"]
    return CrashOutcome(setting, witness.num_deaths, tuple(problems))


def _pass(failpoint: str, draw: random.Random) -> int:
    """Return at which pass to die: early enough that every run gets there."""
    if failpoint in (*_SAVED_AGAIN, *_BEFORE_ANY_CHECKPOINT):
        return 1
    if failpoint in _OFTEN:
        return draw.randrange(1, _OFTEN[failpoint])
    if failpoint.startswith(_EACH_STEP):
        return draw.randrange(1, 10)
    return draw.randrange(1, 3) if failpoint.startswith(("checkpoint.", "rank_checkpoint.after", "ledger.snap")) else 1
