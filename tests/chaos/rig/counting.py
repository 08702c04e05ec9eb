"""What a rigged run trained, counted without the ledger: from what its learner kept in the last checkpoint."""

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

from learner.data.prompt_set import load_prompts
from learner.disk.run_folder import FILTERED, LEDGER
from protocol.settings.settings import Settings
from tests.chaos.rig.processes import final_state


def count_trained(run: Path, settings: Settings, epochs: int) -> tuple[int, int, int]:
    """Return how many groups no step trained, several did, and one did with a sample missing or doubled."""
    samples_of_a_group = list(range(settings.rollout.group_size))
    times: Counter[str] = Counter()
    partial = 0
    for groups in final_state(run).values():
        for group, samples in groups.items():
            times[group] += 1
            partial += sorted(samples) != samples_of_a_group
    prompts = load_prompts(settings.data.train, settings.data)
    wanted = {f"e{epoch}-{prompt.uid}" for epoch in range(epochs) for prompt in prompts}
    with contextlib.closing(sqlite3.connect(run / LEDGER)) as ledger:
        skipped = {row[0] for row in ledger.execute("SELECT \"group\" FROM prompts WHERE state = 'skipped'")}
    return len(wanted - times.keys() - skipped), sum(number > 1 for number in times.values()), partial


def count_filtered(run: Path, settings: Settings) -> tuple[int, int]:
    """Return how many groups were filtered, and how many were trained whose mean reward the filter does not take.

    Trained is what the learner kept; the rewards are the ledger's.
    """
    with contextlib.closing(sqlite3.connect(run / LEDGER)) as ledger:
        means = dict(ledger.execute("SELECT \"group\", AVG(reward) FROM trajectories WHERE kind = 'train' GROUP BY 1"))
        (filtered,) = ledger.execute(
            "SELECT COUNT(*) FROM prompts WHERE state = 'skipped' AND reason LIKE ?", (f"{FILTERED}%",)
        ).fetchone()
    trained = {group for groups in final_state(run).values() for group in groups}
    low, high = settings.filter.low, settings.filter.high
    return filtered, sum(not low < means[group] < high for group in trained)


def trajectory_bytes(ledger: Path) -> list[int]:
    """Return the bytes of each trajectory's arrays: a token is 9 bytes."""
    with contextlib.closing(sqlite3.connect(ledger)) as opened:
        return [9 * row[0] for row in opened.execute("SELECT num_tokens FROM trajectories")]
