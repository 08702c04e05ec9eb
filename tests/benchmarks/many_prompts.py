"""Seconds and memory that a large data set costs: read and checked once, opened by its index, a thousand rows read.

    python -m tests.benchmarks.many_prompts [--seed N] [--short]

Makes a JSONL file of 1,000,000 rows of 1.7 kB (--short: 20,000), verl's shape, chat messages. Each of three is done in
a process of its own: `check` reads and checks every row, as the command does before a run; `open` opens the file by the
index that this left, as the coordinator does at each start; `draw` reads a thousand rows in random order besides. CPU
seconds, and the growth of the process's largest memory. In --short the figures are those of its 20,000 rows.
holds: per million rows the check takes at most 20 CPU seconds and 1 GB, the opening at most 2 seconds; a thousand
draws take at most half a second; and every row drawn is the row that was written.
"""

import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from learner.data.prompt_reading import read_prompts
from learner.data.prompt_set import open_prompts
from protocol.settings.data import DataSettings
from tests.chaos.rig.verdict import conclude, options

_NUM_DRAWS = 1000
_DATA = DataSettings()


def main() -> int:
    given = options(__doc__ or "")
    num_rows = 20_000 if given.short else 1_000_000
    millions = num_rows / 1e6
    with tempfile.TemporaryDirectory() as folder:
        path, index = Path(folder) / "rows.jsonl", Path(folder) / "index.npz"
        write_rows(path, num_rows)
        print(f"{num_rows:,} rows of {path.stat().st_size // num_rows} bytes", flush=True)
        check_s, check_mb, num_found = measured(check, path, index, given.seed)
        open_s, open_mb, num_opened = measured(open_only, path, index, given.seed)
        draw_s, draw_mb, num_right = measured(draw, path, index, given.seed)
    print(f"check {check_s:.2f} s, {check_mb:.0f} MB; open {open_s:.3f} s, {open_mb:.0f} MB", flush=True)
    print(f"{_NUM_DRAWS} rows drawn, {num_right} right: {draw_s:.3f} s, {draw_mb:.0f} MB", flush=True)
    holds = (
        num_found == num_opened == num_rows
        and num_right == _NUM_DRAWS
        and check_s <= 20 * max(millions, 0.1)
        and check_mb <= 1000
        and open_s <= max(2 * millions, 0.5)
        and draw_s - open_s <= 0.5
    )
    figures = {
        "rows": num_rows,
        "check_s": round(check_s, 2),
        "check_mb": round(check_mb),
        "open_s": round(open_s, 3),
        "open_mb": round(open_mb),
        "draw_ms": round(1000 * (draw_s - open_s) / _NUM_DRAWS, 3),
    }
    return conclude("many_prompts", holds, **figures)


def write_rows(path: Path, num_rows: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            file.write(json.dumps(row(i)) + "\n")


def row(number: int) -> dict[str, object]:
    messages = [
        {"role": "system", "content": "You reason step by step. " * 8},
        {"role": "user", "content": f"Question {number}: " + "word " * 150},
    ]
    return {
        "data_source": "gsm8k",
        "prompt": messages,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"split": "train", "index": number, "answer": "because " * 60},
    }


def check(path: Path, index: Path, seed: int) -> int:
    """Return how many rows are usable, after leaving an index of them."""
    found, unusable = read_prompts(str(path), _DATA)
    found.save(index)
    return len(found) - len(unusable)


def open_only(path: Path, index: Path, seed: int) -> int:
    return len(open_prompts(str(path), _DATA, index))


def draw(path: Path, index: Path, seed: int) -> int:
    """Return how many of a thousand rows are the ones that were written."""
    prompts = open_prompts(str(path), _DATA, index)
    places = random.Random(seed).sample(range(len(prompts)), _NUM_DRAWS)
    return sum(prompts[place].label == str(place) for place in places)


def measured(work: Callable[[Path, Path, int], int], path: Path, index: Path, seed: int) -> tuple[float, float, int]:
    """Return (CPU seconds, MB that the process's memory grew by, what the work found) of work in a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(work, path, index, seed, there))
    process.start()
    cpu_s, grown_mb, found = here.recv()
    process.join()
    return cpu_s, grown_mb, found


def _work(work: Callable[[Path, Path, int], int], path: Path, index: Path, seed: int, pipe: Connection) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = work(path, index, seed)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send((time.process_time() - started, (after - before) / 1024, found))


if __name__ == "__main__":
    sys.exit(main())
