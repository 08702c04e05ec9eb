"""One gradient, whatever ranks, ZeRO stage, offload and gradient checkpointing: DeepSpeed for real."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.tiny_models import make_tiny_model
from tests.learner.models import gradient_ranks
from tests.learner.models.gradient_ranks import CASES, LORA_CASES, LOW_CASES, WORLDS

pytestmark = pytest.mark.stack
every_case = pytest.mark.parametrize("name", CASES)
every_low_case = pytest.mark.parametrize("name", LOW_CASES)
every_world = pytest.mark.parametrize("world_size", WORLDS)
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return [ranks, or "read"][case] -> what gradient_ranks found."""
    folder = tmp_path_factory.mktemp("gradients")
    make_tiny_model(folder / "model", tied=True, hidden_size=64)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, gradient_ranks.__file__, str(folder)]
    ended = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {name: torch.load(folder / f"{name}.pt") for name in (*map(str, WORLDS), "read")}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@every_world
@every_case
def test_gradient_is_the_same_to_a_millionth(found: Found, world_size: int, name: str) -> None:
    gradient = found[str(world_size)][name]["exp_avg"]
    assert distance(gradient, found["1"]["zero 0"]["exp_avg"]) < 1e-6


@every_world
@every_low_case
def test_gradient_in_bfloat16_is_that_of_float32_to_its_rounding(found: Found, world_size: int, name: str) -> None:
    gradient = found[str(world_size)][name]["exp_avg"]
    assert distance(gradient, found["1"]["zero 0"]["exp_avg"]) < 0.02


@every_world
@every_low_case
def test_bfloat16_weights_are_rounded_from_float32_masters(found: Found, world_size: int, name: str) -> None:
    of_case = found[str(world_size)][name]
    assert of_case["dtype"] == torch.bfloat16
    assert torch.equal(of_case["weight"].bfloat16(), of_case["model"].bfloat16())
    assert not torch.equal(of_case["weight"], of_case["model"])


@every_world
@pytest.mark.parametrize("name", [name for name in CASES if name != "zero 0"])
def test_push_is_the_weights_of_any_ranks_and_stage(found: Found, world_size: int, name: str) -> None:
    expected = found["1"]["zero 0"]["pushed"]
    torch.testing.assert_close(found[str(world_size)][name]["pushed"], expected, rtol=0, atol=2e-6)


@every_world
@pytest.mark.parametrize("name", LORA_CASES)
def test_adapters_are_trained_and_pushed_merged_alike_on_any_ranks_and_stage(
    found: Found, world_size: int, name: str
) -> None:
    expected, of_case = found["1"]["lora, zero 0"], found[str(world_size)][name]
    assert distance(of_case["exp_avg"], expected["exp_avg"]) < 1e-6
    assert len(of_case["exp_avg"]) < len(found["1"]["zero 0"]["exp_avg"]) / 4
    torch.testing.assert_close(of_case["pushed"], expected["pushed"], rtol=0, atol=2e-6)
    assert len(of_case["pushed"]) == len(found["1"]["zero 0"]["pushed"])


@every_world
@pytest.mark.parametrize("name", [*CASES, *LORA_CASES])
def test_state_of_each_is_read_by_one_rank_in_stage_0(found: Found, world_size: int, name: str) -> None:
    expected = found["read"]["1 lora, zero 0" if name in LORA_CASES else "1 zero 0"]
    torch.testing.assert_close(found["read"][f"{world_size} {name}"], expected, rtol=0, atol=2e-6)
