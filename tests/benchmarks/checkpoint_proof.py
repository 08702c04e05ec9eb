"""What the proofs of checkpoints cost the training beside them: the quick start with and without, in turns.

    deploy/start_cluster.sh && .venv/bin/python -m tests.benchmarks.checkpoint_proof [--steps 60] [--pairs 2]

Real parts throughout. A checkpoint every 15 steps, twice as many as the quick start makes; runs are with, without,
without, with, and so on. Compared are the seconds of a step from the first step's end to the last one's, so a proof
that the end of a run waits for is not in them; what each proof took is printed. holds: every run exits with 0, the
last checkpoint of each run with proofs is proven, and a step takes at most 5 % longer with them (median of the pairs).
About five minutes a run on two cores, so not part of CI. --short: 20 steps, one pair, and no time is asked for.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from learner.checkpoint.proof import read_proof
from tests.benchmarks.quickstart_run import Outcome, run_quickstart
from tests.chaos.rig.verdict import conclude, options

_EVERY_STEPS = 15
_MAX_SHARE = 0.05


def main() -> int:
    asked = options(__doc__, steps=60, pairs=2)
    num_steps, num_pairs = (20, 1) if asked.short else (asked.steps, asked.pairs)
    shares, failed, unproven = [], 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(num_pairs):
            step_s: dict[bool, float] = {}
            for is_proving in (True, False) if pair % 2 == 0 else (False, True):
                folder = Path(scratch) / f"{'with' if is_proving else 'without'}-{pair}"
                outcome = _run(folder, num_steps, asked.seed + pair, is_proving)
                step_s[is_proving] = outcome.step_s
                failed += outcome.exit_status != 0
                unproven += is_proving and not _tell_proofs(folder)
                print(f"{folder.name}: {outcome.step_s:.3f} s a step, exit {outcome.exit_status}", flush=True)
            shares.append(step_s[True] / step_s[False] - 1.0)
    share = statistics.median(shares)
    holds = not failed and not unproven and (asked.short or share <= _MAX_SHARE)
    return conclude("checkpoint_proof", holds, pairs=num_pairs, steps=num_steps, share=share, unproven=unproven)


def _run(folder: Path, num_steps: int, seed: int, is_proving: bool) -> Outcome:
    changed: dict[str, object] = {
        "run.max_steps": num_steps,
        "run.seed": seed,
        "learner.checkpoint_every_steps": _EVERY_STEPS,
        "learner.prove_checkpoints": is_proving,
        "learner.keep_checkpoints": 2 + num_steps // _EVERY_STEPS,
        "eval.every_steps": 0,
    }
    return run_quickstart(folder, changed)


def _tell_proofs(run: Path) -> bool:
    """Print what each proof of a run took; returns whether `latest` is proven."""
    for path in sorted((run / "checkpoints").glob("step_*")):
        if (proof := read_proof(path)) is not None:
            took = f"{proof.seconds:.1f} s, {proof.cpu_s:.1f} CPU s, {proof.peak_mib} MiB"
            print(f"{run.name} {path.name}: {proof.verdict} {proof.problem} in {took}", flush=True)
    latest = read_proof(run / "checkpoints" / "latest")
    return latest is not None and latest.verdict == "proven"


if __name__ == "__main__":
    sys.exit(main())
