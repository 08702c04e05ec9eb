"""Whole runs: the quick start on two GPUs or on one, and a model of 0.5B on one; what they take beside the roofline."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.gpu.finding import Finding, Machine, Part

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 540.0
# On CPUs the quick start hardly warms up.
_BRIEF = ["--policy.warm_start.max_steps", "20", "--eval.num_prompts", "16", "--learner.groups_per_step", "4"]
_FIGURES = {
    "train_s": "time/train_s",
    "push_s": "time/push_s",
    "push_pause_s": "time/push_pause_s",
    "switch_s": "time/switch_s",
    "tokens_per_s": "perf/tokens_per_s",
    "mfu": "perf/mfu",
}
_ROOFLINE = {"roofline_train_tokens_per_s": 84e3, "roofline_mfu": 0.25}  # README.md: 0.5B on one H100


def show(machine: Machine) -> Finding:
    return _run(machine, 2, ["--placement.devices", "split"])


def show_shared(machine: Machine) -> Finding:
    """Return the same of one GPU, on which learner and server take turns."""
    return _run(machine, 1, ["--placement.devices", "shared"])


def show_half_b(machine: Machine) -> Finding:
    """Random weights, 8 samples of 64 prompts a step, answers of at most 512 tokens; on CPUs a small model."""
    from tests.gpu.models import SHAPES, TINY, write_folder

    is_small = machine.is_short or machine.device == "cpu"
    with tempfile.TemporaryDirectory() as place:
        model = write_folder(Path(place) / "model", TINY if is_small else SHAPES["0.5B"])
        rows = Path(place) / "prompts.jsonl"
        rows.write_text("".join(f'{{"prompt": "What is {n} + 1?", "label": "{n + 1}"}}\n' for n in range(512)))
        options = ["--policy.model", str(model), "--data.train", str(rows), "--policy.dtype", "bfloat16"]
        sizes = ("4", "32", "128") if is_small else ("64", "512", "1024")
        names = ("--learner.groups_per_step", "--rollout.max_response_tokens", "--rollout.max_context_tokens")
        options += [word for pair in zip(names, sizes, strict=True) for word in pair]
        found = _run(machine, 1, [*options, "--rollout.group_size", "8", "--placement.devices", "shared"])
    return Finding(found.sentence, found.holds, found.figures | ({} if is_small else _ROOFLINE))


def _run(machine: Machine, num_gpus: int, options: list[str]) -> Finding:
    if machine.device == "cpu":
        num_gpus = 0
        options = options if "--policy.model" in options else [*options, *_BRIEF]
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "gpu-prove"
        where = ["--run.name", run.name, "--run.dir", place, "--run.max_steps", "4"]
        try:
            _do(["bash", "deploy/start_cluster.sh", "--num-gpus", str(num_gpus)])
            _do([sys.executable, "-m", "learner.run", *where, *options])
            _do([sys.executable, "-m", "learner.audit", str(run)])
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        finally:
            subprocess.run(["bash", "deploy/stop_cluster.sh"], cwd=_ROOT, check=False, timeout=300)
    steps = [line for line in lines if line.get("step", 0) > 1]  # the first compiles
    values = {name: [line[key] for line in steps if key in line] for name, key in _FIGURES.items()}
    figures = {name: median(found) for name, found in values.items() if found}
    return Finding("four steps ran and passed the audit; medians", True, figures)


def _do(command: list[str]) -> None:
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if ended.returncode:
        raise RuntimeError(
            f"{' '.join(command)} exited with {ended.returncode}: {(ended.stdout + ended.stderr)[-1500:]}"
        )


_NEEDS = ("torch", "vllm", "ray", "deepspeed")
LOOP = Part("loop", "the quick start trains", _NEEDS, 2, show)
SHARED_LOOP = Part("shared_loop", "the quick start trains on one GPU", _NEEDS, 1, show_shared)
HALF_B_LOOP = Part("half_b_loop", "a model of 0.5B trains on one GPU", _NEEDS, 1, show_half_b)
