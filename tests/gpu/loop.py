"""The whole loop: a cluster with real vLLM on one GPU, a learner on another, three steps of the quick start."""

import subprocess
import sys
from pathlib import Path

from tests.gpu.finding import Finding, Machine, Part, unchecked

_ROOT = Path(__file__).parents[2]
_RUN = ["-m", "learner.run", "--run.name", "gpu-prove", "--run.max_steps", "3", "--run.resume", "never"]


def show(machine: Machine) -> Finding:
    if machine.device != "cuda":
        return unchecked("tests/flow runs the loop on CPUs")
    try:
        _do(["bash", "deploy/start_cluster.sh"])
        shown = _do([sys.executable, *_RUN])
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


LOOP = Part("loop", "the quick start trains", ("torch", "vllm", "ray", "deepspeed"), 2, show)
