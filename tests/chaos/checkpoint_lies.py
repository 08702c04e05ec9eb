"""Well-formed wrong checkpoints, one seeded lie after the other: does any prove itself?

    python -m tests.chaos.checkpoint_lies [--seed N] [--short] [--lies N]

A policy, a critic and a reference are trained for four steps by DeepSpeed on one rank and saved at each. The last three
checkpoints are copied, made to lie in one way (the last save repeated, a swapped shard, a stale optimizer, another
role's file, ...), sealed with a right manifest, and proven. Counted are lies that pass (passed), lies that are refused
for another reason than the lie (wrong_reason), and honest checkpoints that are refused (false_alarms). Every proof is
made in a process as a run has it, but in `--short`, which proves in this one. holds: all three are 0. `--short` tells
36 lies, each kind once.
"""

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from learner.checkpoint.manifest import look_at, verify
from learner.checkpoint.proof import Proof
from learner.rank.proof.process import ProofProcess
from learner.rank.proof.request import ProofRequest, make_request
from learner.rank.proof.verdict import verdict
from protocol.settings.policy import LoraSettings
from tests.chaos.checkpoint_mutations import content
from tests.chaos.rig.lies import LIES
from tests.chaos.rig.lying_case import Case, reseal
from tests.chaos.rig.proved_run import STEPS, ProvedRun, make_proved_run
from tests.chaos.rig.verdict import conclude, options

Prove = Callable[[ProofRequest], Proof]

_LIMIT_S = 600.0
# What a resume may change, or try to: it is for the ranks to refuse, and nothing is wrong with the files.
_CHANGED: tuple[dict[str, Any], ...] = ({"dtype": "float32"}, {"lora": LoraSettings(rank=4)})


def main() -> int:
    asked = options(__doc__, lies=1000)
    num_lies = len(LIES) if asked.short else asked.lies
    draw = random.Random(asked.seed)
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, closing(ProofProcess()) as process:
        run = make_proved_run(Path(scratch), asked.seed)
        prove = verdict if asked.short else partial(_in_a_process, process)
        counts["false_alarms"] += _false_alarms(run, prove)
        for number in range(num_lies):
            lie = list(LIES)[number % len(LIES)]
            problem = tell_lie(run, lie, Path(scratch) / "copy", draw, prove)
            kinds[lie.__name__] += 1
            counts["passed"] += problem is None
            if problem is None or not any(word in problem for word in LIES[lie]):
                counts["wrong_reason"] += problem is not None
                print(f"{lie.__name__}: {problem or 'PASSED'}", flush=True)
    for kind, count in sorted(kinds.items()):
        print(f"{kind:36} {count}")
    print(f"{time.monotonic() - started:.0f} s")
    figures = {key: counts[key] for key in ("passed", "wrong_reason", "false_alarms")}
    return conclude("checkpoint_lies", not any(figures.values()), lies=kinds.total(), **figures)


def tell_lie(run: ProvedRun, lie: Callable[[Case], None], copy: Path, draw: random.Random, prove: Prove) -> str | None:
    """Return why a lie is refused, None when it passes. A lie that changed nothing is told again."""
    while True:
        step = draw.choice(STEPS[1:])
        honest, told = run.checkpoint(step), run.told[step]
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(honest, copy)
        case = Case(copy, run.checkpoint(step - 1), told, look_at(honest), draw)
        lie(case)
        if (content(copy), case.facts, case.told) != (content(honest), look_at(honest), told):
            break
    reseal(case)
    verify(copy)  # it is well formed
    found = prove(make_request(copy, run.model, run.settings, case.told))
    return None if found.verdict == "proven" else f"{found.verdict}: {found.problem}"


def _in_a_process(process: ProofProcess, request: ProofRequest) -> Proof:
    found = process.prove(request, _LIMIT_S, lambda: False, lambda: True)
    assert found is not None
    return found


def _false_alarms(run: ProvedRun, prove: Prove) -> int:
    """Return how many honest checkpoints are refused."""
    alarms = 0
    for step in STEPS:
        found = prove(make_request(run.checkpoint(step), run.model, run.settings, run.told[step]))
        print(f"honest step {step}: {found}", flush=True)
        alarms += found.verdict != "proven"
    for policy in _CHANGED:
        changed = run.settings.model_copy(update={"policy": run.settings.policy.model_copy(update=policy)})
        found = prove(make_request(run.checkpoint(STEPS[-1]), run.model, changed, run.told[STEPS[-1]]))
        print(f"honest, and the run goes on with {policy}: {found}", flush=True)
        alarms += found.verdict != "proven"
    return alarms


if __name__ == "__main__":
    sys.exit(main())
