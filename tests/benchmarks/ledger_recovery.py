"""Seconds that a coordinator needs to go on from a large ledger after SIGKILL, and what accounting costs in one.

    python -m tests.benchmarks.ledger_recovery [--seed N] [--short] [--folder DIR]

Makes a ledger of 1,000,000 prompts x 4 trajectories (--short: 50,000), all trained but the newest; a process accounts
further groups in it, one commit for each message, and is killed with 1,024 groups outstanding, some failed. Then, with
the file out of the page cache: open, begin_incarnation, recall_unfinished; then three copies that a checkpoint takes,
while 1,000 trajectories a second are accounted. snapshot_s: until a copy is whole. blocked_s: the longest that the
accounting thread was held up by its beginning, beside it or just after it, in one commit. wal_mb: what the log grew to.
Medians of the three.
holds: recovery takes at most 2 s, finds what was out, accounting takes more than 1,000 trajectories a second, and no
copy holds it up for more than a second. In --short the seconds are shown, and not judged: the machine may be busy.
"""

import multiprocessing
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from learner.ledger.ledger import Ledger
from protocol.wire.trajectory import TrajectoryFacts, VersionSpan
from tests.chaos.rig.verdict import conclude, options
from tests.protocol.wire.examples import example_facts

_GROUP_SIZE = 4
_GROUPS_PER_STEP = 64
_OUTSTANDING = 1024
_MAX_RECOVERY_S = 2.0
_MIN_TRAJECTORIES_PER_S = 1000.0
_MAX_BLOCKED_S = 1.0
_FACTS = example_facts(incarnation=1, num_tokens=600, num_prompt_tokens=200)


def main() -> int:
    given = options(__doc__ or "", folder="")
    num_prompts, num_live = (50_000, 640) if given.short else (1_000_000, 6400)
    with tempfile.TemporaryDirectory(dir=given.folder or None) as folder:
        path = Path(folder) / "ledger.sqlite"
        started = time.monotonic()
        fill(path, num_prompts, given.seed)
        print(f"{num_prompts:,} prompts in {time.monotonic() - started:.1f} s, {megabytes(path):.0f} MB", flush=True)
        trajectories_per_s = account_until_killed(path, num_live, given.seed)
        print(f"accounted {num_live:,} groups more: {trajectories_per_s:.0f} trajectories/s; killed", flush=True)
        forget_pages(path)
        open_s, begin_s, recall_s, is_found, ledger = recover(path)
        copies = [copy_beside_accounting(ledger, path, number) for number in range(3)]
        snapshot_s, blocked_s, wal_mb = (statistics.median(figures) for figures in zip(*copies, strict=True))
        size_mb = megabytes(path)
        ledger.close()
    recovery_s = open_s + begin_s + recall_s
    is_quick = recovery_s <= _MAX_RECOVERY_S and blocked_s <= _MAX_BLOCKED_S
    is_quick = is_quick and trajectories_per_s > _MIN_TRAJECTORIES_PER_S
    return conclude(
        "ledger_recovery",
        is_found and (given.short or is_quick),
        prompts=num_prompts,
        ledger_mb=size_mb,
        open_s=open_s,
        begin_s=begin_s,
        recall_s=recall_s,
        recovery_s=recovery_s,
        snapshot_s=snapshot_s,
        blocked_s=blocked_s,
        wal_mb=wal_mb,
        trajectories_per_s=trajectories_per_s,
    )


def fill(path: Path, num_prompts: int, seed: int) -> None:
    """Write a ledger whose prompts are all trained, as fast as SQLite takes it."""
    Ledger(path).close()
    uids = random.Random(seed)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = -1000000")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN")
        for first in range(0, num_prompts, 10_000):
            groups = [(f"e0-{uids.getrandbits(80):020x}", place) for place in range(first, first + 10_000)]
            db.executemany(
                "INSERT INTO prompts VALUES (?1, 0, substr(?1, 4), ?2, 'trained', 's1', 1, ?2 / 64 + 1, NULL, 0)",
                groups,
            )
            db.executemany(
                "INSERT INTO trajectories VALUES (?1, ?3, 1, 1, 'train', 0, 's1', 0.5, '{\"exact_match\": 0.5}', "
                "600, 400, 2, 'answer', ?2 / 64, ?2 / 64, ?2 / 64 + 1, 0, 100.0, 101.5, 101.6, NULL)",
                [(group, place, index) for group, place in groups for index in range(_GROUP_SIZE)],
            )
        db.execute("COMMIT")


def account_until_killed(path: Path, num_groups: int, seed: int) -> float:
    """Have a process of its own account groups until it is killed; returns its trajectories per second."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_account, args=(path, num_groups, seed, theirs))
    process.start()
    rate = float(ours.recv())
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return rate


def _account(path: Path, num_groups: int, seed: int, pipe: Connection) -> None:
    uids = random.Random(seed + 1)
    ledger = Ledger(path)
    position = ledger.begin_incarnation(0) + 10**9
    started = time.monotonic()
    for step in range(num_groups // _GROUPS_PER_STEP):
        groups = [f"e1-{uids.getrandbits(80):020x}" for _ in range(_GROUPS_PER_STEP)]
        for group in groups:
            position += 1
            _account_group(ledger, group, position, step)
        ledger.set_state(groups, "assigned", step)
        ledger.commit()
        ledger.mark_trained(groups, step, step)
        ledger.set_meta("policy_version", str(step))
        ledger.commit()
    rate = num_groups * _GROUP_SIZE / (time.monotonic() - started)
    for place in range(_OUTSTANDING):
        group = f"e1-{uids.getrandbits(80):020x}"
        _account_group(ledger, group, position + 1 + place, 0)
        if place % 8 == 0:
            ledger.add_failure(group, 0, 1, "s1", "server", "s1 died")
    ledger.commit()
    pipe.send(rate)
    signal.pause()


def _account_group(ledger: Ledger, group: str, position: int, version: int) -> None:
    """What the coordinator writes of one group until it is ready, a commit for each message."""
    ledger.set_meta("position", str(position))
    ledger.lease(group, 1, group[3:], position, "s1", 1)
    ledger.commit()
    for index in range(_GROUP_SIZE):
        ledger.add_trajectory(_facts(group, index, version))
        ledger.commit()
    ledger.set_state([group], "ready")
    ledger.commit()


def _facts(group: str, index: int, version: int) -> TrajectoryFacts:
    spans = [VersionSpan(200, 600, version)]
    return msgspec.structs.replace(_FACTS, group=group, sample_index=index, version_spans=spans)


def recover(path: Path) -> tuple[float, float, float, bool, Ledger]:
    """Return seconds of open, begin_incarnation and recall_unfinished, and whether all that was out was found."""
    times = [time.monotonic()]
    ledger = Ledger(path)
    times.append(time.monotonic())
    ledger.begin_incarnation(0)
    times.append(time.monotonic())
    recalled = ledger.recall_unfinished()
    times.append(time.monotonic())
    open_s, begin_s, recall_s = (b - a for a, b in pairwise(times))
    num_failed = sum(bool(prompt.failures) for prompt in recalled)
    is_found = (len(recalled), num_failed) == (_OUTSTANDING, _OUTSTANDING // 8)
    return open_s, begin_s, recall_s, is_found, ledger


def copy_beside_accounting(ledger: Ledger, path: Path, number: int) -> tuple[float, float, float]:
    """Return the seconds that a copy took, the longest that accounting stood still for it, and the log's megabytes."""
    turns = [time.monotonic()]
    copy = ledger.begin_copy(path.with_name(f"copy_{number}.sqlite"))
    with ThreadPoolExecutor(1) as thread:
        blocked_s = time.monotonic() - turns[0]
        making = thread.submit(copy.make)
        is_over = False
        while not is_over:
            is_over = making.done()  # the turn after its end is one of them: it may move what the log has gathered
            time.sleep(_GROUP_SIZE / _MIN_TRAJECTORIES_PER_S)
            turns.append(time.monotonic())
            _account_group(ledger, f"e2-{number}-{len(turns)}", 2 * 10**9 + len(turns), 0)
            blocked_s = max(blocked_s, time.monotonic() - turns[-1])
        assert making.result()
    return turns[-1] - turns[0], blocked_s, path.with_name(f"{path.name}-wal").stat().st_size / 2**20


def forget_pages(path: Path) -> None:
    """Have the kernel drop the file's pages, so that recovery reads from the disk."""
    for file in (path, path.with_name(f"{path.name}-wal")):
        with file.open("rb") as open_file:
            os.fsync(open_file.fileno())
            os.posix_fadvise(open_file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def megabytes(path: Path) -> float:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")) / 2**20


if __name__ == "__main__":
    sys.exit(main())
