"""The whole loop, three steps of the quick start: real vLLM on one GPU and the learner on another, or both on one."""

import subprocess
import sys
from pathlib import Path

from tests.gpu.finding import Finding, Machine, Part, unchecked

_ROOT = Path(__file__).parents[2]
_RUN = ["-m", "learner.run", "--run.name", "gpu-prove", "--run.max_steps", "3", "--run.resume", "never"]


def show(machine: Machine) -> Finding:
    return _run(machine, "2", "split")


def show_shared(machine: Machine) -> Finding:
    """Return the same of one GPU, on which learner and server take turns; at staleness 1, the quick start's."""
    return _run(machine, "1", "auto")


def _run(machine: Machine, num_gpus: str, devices: str) -> Finding:
    if machine.device != "cuda":
        return unchecked("tests/flow runs the loop on CPUs")
    try:
        _do(["bash", "deploy/start_cluster.sh", "--num-gpus", num_gpus])
        shown = _do([sys.executable, *_RUN, "--placement.devices", devices])
        _do([sys.executable, "-m", "learner.audit", "runs/gpu-prove"])
    finally:
        subprocess.run(["bash", "deploy/stop_cluster.sh"], cwd=_ROOT, check=False, timeout=300)
    return Finding("three steps ran and passed the audit: " + shown.strip().splitlines()[-1], holds=True)


def _do(command: list[str]) -> str:
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if ended.returncode:
        raise RuntimeError(
            f"{' '.join(command)} exited with {ended.returncode}: {(ended.stdout + ended.stderr)[-1500:]}"
        )
    return ended.stdout


_NEEDS = ("torch", "vllm", "ray", "deepspeed")
LOOP = Part("loop", "the quick start trains", _NEEDS, 2, show)
SHARED_LOOP = Part("shared_loop", "the quick start trains on one GPU", _NEEDS, 1, show_shared)
