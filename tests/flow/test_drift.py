"""Learner and engine stay together: nothing drifts where nothing is learned, and what is learned arrives.

Real vLLM on CPUs samples, a real DeepSpeed rank trains, real pushes carry the weights; one process for each engine.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.flow import pushing_rank

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def as_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """bfloat16 on both sides, an engine of two workers; PPO in ZeRO 3 with weights and optimizers offloaded, gradient
    checkpointing and recomputed old logprobs."""
    return seen("as_on_gpus", tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A mixture of experts in float32: not trained, trained whole, and trained by LoRA adapters, pushed merged."""
    return seen("mixture", tmp_path_factory.mktemp("mixture"))


def seen(kind: str, folder: Path) -> dict[str, Any]:
    """Return what every learner of this kind saw."""
    ended = subprocess.run(
        [sys.executable, pushing_rank.__file__, kind, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / f"{kind}.pt")
    return found


def test_nothing_drifts_in_float32(mixture: dict[str, Any]) -> None:
    check_drift(mixture["float32"], limit=1e-3)


def test_nothing_drifts_in_bfloat16(as_on_gpus: dict[str, Any]) -> None:
    check_drift(as_on_gpus["bfloat16"], limit=0.05)


def check_drift(seen: dict[str, Any], limit: float) -> None:
    """Check twenty steps at learning rate 0, each with a push. limit: of a token's logprob difference, nats."""
    assert len(seen["metrics"]) == pushing_rank.NUM_STEPS
    assert len(set(seen["digests"])) == 1
    for step in seen["metrics"]:
        assert step["logprob_difference_max"] <= limit
        assert step["ratio_mean"] == pytest.approx(1.0, abs=limit / 10)
        assert step["clip_fraction"] == 0.0


@pytest.mark.parametrize("name", ["mixture", "lora"])
def test_engine_answers_greedily_by_the_weights_that_every_push_brought(mixture: dict[str, Any], name: str) -> None:
    assert len(set(mixture[name]["digests"])) == pushing_rank.NUM_LEARNT + 1
    assert max(mixture[name]["greedy"]) < 1e-3
