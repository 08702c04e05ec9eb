"""Lives of a run's books and checkpoints that end at a failpoint, run by test_crash_points.

    python crash_lives.py FOLDER

A life is what the driver and the coordinator do with the disk, without models: start from the run folder, take steps of
two prompts, save a checkpoint with each. For each failpoint and each state of the run folder that a life can begin in,
one life is killed there, what it leaves is looked at, and a next life goes on to the last step. Prints one JSON line
for each: which failpoint, in which state, at which pass; whether it was met; and what was wrong.

Lives are forks: starting Python for each would take a second, of 0.05.
"""

import importlib
import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import protocol.failpoints
from learner.checkpoint.folder import begin, newest_valid, rotate
from learner.checkpoint.manifest import Checkpoint, CorruptCheckpointError, verify
from learner.coordinator.steps.record import RunRecord
from learner.disk.run_folder import CHECKPOINTS, LEDGER
from learner.ledger.ledger import Ledger
from learner.run.start import plan_start, prepare_folder
from protocol.failpoints import FAILPOINTS, VARIABLE
from protocol.settings.settings import Settings
from tests.fakes.checkpoints import commit

ROOMS = ("checkpoint.", "run_folder.", "ledger.", "run_record.")
REACHABLE = tuple(name for name in FAILPOINTS if name.startswith(ROOMS))
STATES = ("new", "killed after two checkpoints", "killed before the first checkpoint")
LAST_STEP = 3
_PER_STEP = 2


def live(folder: Path, last_step: int = LAST_STEP, is_saving: bool = True) -> None:
    """Go on from what is in the folder to `last_step`, as the driver, the coordinator and rank 0 do."""
    settings = Settings.model_validate({"run": {"dir": str(folder.parent), "name": folder.name, "max_steps": 100}})
    start = plan_start(settings.run, "model-1")
    prepare_folder(start, settings)
    ledger = Ledger(folder / LEDGER)
    ledger.begin_incarnation(start.step)
    record = RunRecord(folder, 0)
    prompts = _prompts(ledger)
    for step in range(start.step + 1, last_step + 1):
        groups = [next(prompts) for _ in range(_PER_STEP)]
        next(prompts)  # one is out when the step ends
        ledger.commit()
        ledger.set_state(groups, "assigned", step)
        ledger.mark_trained(groups, step, step - 1)
        record.write_line(record.stamp(step, step, {}))
        ledger.commit()
        if is_saving:
            save(folder, ledger, step)
    if is_saving:
        save(folder, ledger, last_step)  # the same step again: the folder of that name has to give way
    # The process ends without closing the ledger: its log stays, as after a death.


def save(folder: Path, ledger: Ledger, step: int) -> None:
    aside = begin(folder / CHECKPOINTS, step)
    for rank in range(2):
        (aside / "state").mkdir(exist_ok=True)
        (aside / "state" / f"rank_{rank}").write_bytes(f"weights of step {step}".encode() * 100)
    ledger.begin_copy(aside / LEDGER).make()
    root = folder / CHECKPOINTS
    commit(aside, Checkpoint(aside, step, step, folder.name, "model-1"))
    rotate(root, keep=2)


def _prompts(ledger: Ledger) -> Iterator[str]:
    """Lease and yield what an earlier life left out, then the prompts after the ledger's position."""
    for old in ledger.recall_unfinished():
        ledger.lease(old.group, old.epoch, old.uid, old.position, "server", old.attempt + 1)
        yield old.group
    while True:
        position = int(ledger.meta("position") or 0)
        ledger.set_meta("position", str(position + 1))
        ledger.lease(f"g{position}", 0, f"u{position}", position, "server", 1)
        yield f"g{position}"


def look_at_the_dead(folder: Path, oldest_acceptable: int) -> list[str]:
    """Return what is wrong with what a life left: `latest`, the newest valid checkpoint, or a ledger that opens not."""
    wrong = []
    root = folder / CHECKPOINTS
    found = newest_valid(root)
    if (found.step if found else 0) < oldest_acceptable:
        wrong.append(f"newest valid is {found}, step {oldest_acceptable} was there before")
    latest = root / "latest"
    if latest.is_symlink():
        try:
            verify(latest.resolve())
        except CorruptCheckpointError as error:
            wrong.append(f"latest: {error}")
    elif oldest_acceptable:
        wrong.append("latest is gone")
    if (folder / LEDGER).exists():
        # A copy, log and all: opening it must change nothing for the next life.
        with tempfile.TemporaryDirectory() as scratch:
            for file in folder.glob(f"{LEDGER}*"):
                shutil.copyfile(file, Path(scratch) / file.name)
            with closing(sqlite3.connect(Path(scratch) / LEDGER)) as db:
                if (problem := db.execute("PRAGMA integrity_check").fetchall()) != [("ok",)]:
                    wrong.append(f"the dead life's ledger: {problem}")
    return wrong


def look_at_a_half_prepared(folder: Path) -> list[str]:
    """Return whether a life that died in `prepare_folder` left a checkpoint's ledger beside another one's log."""
    found = newest_valid(folder / CHECKPOINTS)
    if found is None or not (folder / f"{LEDGER}-wal").exists():
        return []
    is_restored = (folder / LEDGER).read_bytes() == (found.path / LEDGER).read_bytes()
    return ["the checkpoint's ledger stands beside the old one's log"] if is_restored else []


def look_at_the_end(folder: Path) -> list[str]:
    """Return what is wrong after the life that reached the last step."""
    wrong = look_at_the_dead(folder, LAST_STEP)
    root = folder / CHECKPOINTS
    leftovers = [path.name for path in [*root.glob(".*"), *folder.glob(".*")]]
    if leftovers:
        wrong.append(f"left over: {leftovers}")
    valid = [verify(path).step for path in sorted(root.glob("step_*"))]
    if valid != [LAST_STEP - 1, LAST_STEP]:
        wrong.append(f"checkpoints {valid}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if [line["step"] for line in lines] != list(range(1, LAST_STEP + 1)):
        wrong.append(f"metrics of steps {[line['step'] for line in lines]}")
    for ledger in (folder / LEDGER, root / "latest" / LEDGER):
        wrong += [f"{ledger}: {problem}" for problem in _look_at_ledger(ledger)]
    return wrong


def _look_at_ledger(path: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        trained = db.execute("SELECT step, COUNT(*) FROM prompts WHERE state = 'trained' GROUP BY step").fetchall()
    expected = [(step, _PER_STEP) for step in range(1, LAST_STEP + 1)]
    return [] if trained == expected else [f"trained by step {trained}"]


def in_a_process(life: Callable[[], None], failpoint: str | None = None) -> bool:
    """Run a life in a fork; returns whether it was killed by its failpoint. Raises: RuntimeError when it failed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if failpoint is not None:
                os.environ[VARIABLE] = failpoint
                importlib.reload(protocol.failpoints)  # in place: it reads the variable when it is loaded
            life()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status:
        raise RuntimeError(f"a life ended with wait status {status}")
    return False


def make_state(state: str, folder: Path) -> int:
    """Bring the folder to a state; returns the step of its newest checkpoint."""
    if state == STATES[0]:
        return 0
    if state == STATES[2]:
        in_a_process(lambda: live(folder, 2, is_saving=False))
        return 0
    in_a_process(lambda: live(folder, 2))
    in_a_process(lambda: live(folder, LAST_STEP, is_saving=False))
    shutil.copytree(folder / CHECKPOINTS / "step_000002", folder / CHECKPOINTS / "step_000009")  # not what it says
    return 2


def _cases() -> Iterator[tuple[str, str, int]]:
    """Yield failpoint, state and pass. Only a start's own deaths depend on all that the folder may hold."""
    for name in REACHABLE:
        if name.startswith("run_folder."):
            yield from ((name, state, 1) for state in STATES)
        elif name.startswith("checkpoint."):
            yield from ((name, state, 1) for state in STATES[:2])
        else:
            yield from ((name, STATES[0], number) for number in (1, 3))


def main() -> None:
    work = Path(sys.argv[1])
    kept = {}
    for state in STATES:
        start = work / state / "run"
        kept[state] = make_state(state, start)
    for place, (name, state, number) in enumerate(_cases()):
        folder = work / str(place) / "run"
        if (work / state / "run").exists():
            shutil.copytree(work / state / "run", folder, symlinks=True)
        is_met = in_a_process(lambda folder=folder: live(folder), f"{name}:kill@{number}")  # type: ignore[misc]
        wrong = look_at_the_dead(folder, kept[state]) if is_met else []
        wrong += look_at_a_half_prepared(folder) if is_met and name.startswith("run_folder.") else []
        in_a_process(lambda folder=folder: live(folder))  # type: ignore[misc]
        wrong += look_at_the_end(folder)
        shutil.rmtree(work / str(place))
        print(json.dumps({"name": name, "state": state, "pass": number, "is_met": is_met, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
