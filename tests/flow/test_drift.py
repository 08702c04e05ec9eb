"""Learner and engine stay together: nothing drifts where nothing is learned, and what is learned arrives.

Real vLLM on CPUs samples, a real DeepSpeed rank trains, real pushes carry the weights; all in one process
but the workers of an engine that has several.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_model
from tests.flow import pushing_rank, pushing_ranks

pytestmark = [pytest.mark.stack, pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what every learner of pushing_rank saw."""
    folder = tmp_path_factory.mktemp("drift")
    ended = subprocess.run(
        [sys.executable, pushing_rank.__file__, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / "seen.pt")
    return found


def test_nothing_drifts_in_float32(seen: dict[str, Any]) -> None:
    check_drift(seen["float32"], limit=1e-3)


def test_nothing_drifts_in_bfloat16(seen: dict[str, Any]) -> None:
    check_drift(seen["bfloat16"], limit=0.05)
    assert seen["bfloat16"]["num_batched"] == 2 * 2048  # vLLM's for a server with two workers; without a context, 2048


def check_drift(seen: dict[str, Any], limit: float) -> None:
    """Check steps at learning rate 0, each with a push. limit: of a token's logprob difference, nats."""
    assert len(seen["metrics"]) == pushing_rank.NUM_STEPS
    assert len(set(seen["digests"])) == 1
    for step in seen["metrics"]:
        assert step["policy/logprob_difference_max"] <= limit
        assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=limit / 10)
        assert step["policy/clip_share"] == 0.0


@pytest.mark.parametrize("name", ["mixture", "lora"])
def test_engine_answers_greedily_by_the_weights_that_every_push_brought(seen: dict[str, Any], name: str) -> None:
    assert len(set(seen[name]["digests"])) == pushing_rank.NUM_LEARNT + 1
    assert max(seen[name]["greedy"]) < 1e-3


def test_a_quantised_engine_answers_by_the_weights_that_every_push_brought(seen: dict[str, Any]) -> None:
    assert len(set(seen["quantised"]["digests"])) == pushing_rank.NUM_LEARNT + 1
    # Eight bits for a weight move a logprob by hundredths; weights of the step before by tenths.
    assert 1e-3 < max(seen["quantised"]["greedy"]) < 0.1


def test_each_worker_of_a_server_takes_the_weights_from_the_rank_on_its_own_device(tmp_path: Path) -> None:
    model, port = make_tiny_model(tmp_path, tied=False), str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    first, other = (
        subprocess.Popen(
            [sys.executable, pushing_ranks.__file__, str(rank), port, str(model)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    )
    told = first.communicate(timeout=500)[0], other.communicate(timeout=60)[0]
    assert (first.returncode, other.returncode) == (0, 0), told
    for version in (1, 2):
        assert f"version {version}: ('sluice-rollout-0',) {{}}" in told[0]
