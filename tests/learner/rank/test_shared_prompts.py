"""A step of every objective is the same whether samples share their prompt or not: DeepSpeed for real."""

from typing import Any

import pytest
import torch

from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import run_warm
from tests.learner.models.small_policy import flat
from tests.learner.rank.shared_prompts_ranks import CASES

pytestmark = [pytest.mark.stack, pytest.mark.ranks]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shared_prompts")
    make_tiny_model(folder / "model", tied=True, hidden_size=64, num_layers=2)
    make_tiny_model(folder / "teacher", tied=True, hidden_size=64, num_layers=1, seed=1)
    ended = run_warm("tests.learner.rank.shared_prompts_ranks", str(folder), timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {name: torch.load(folder / f"{name}.pt") for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_step_with_shared_prompts_is_that_without(found: dict[str, Any], name: str) -> None:
    shared, alone = found[name]["True"], found[name]["False"]
    assert shared["applied"]
    assert alone["applied"]
    assert shared["metrics"]["policy/grad_norm"] > 1e-3
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-5)
    ours, theirs = flat(shared["weights"]), flat(alone["weights"])
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    # They went through other micro-batches, so no step rounds like the other.
    assert not torch.equal(ours, theirs)


def test_computed_tokens_have_a_shared_prompt_once(found: dict[str, Any]) -> None:
    """perf/mfu was of four prompts of 100 tokens in each of the four groups."""
    shared, alone = (found["grpo with a reference"][each]["computed"] for each in ("True", "False"))
    assert alone - shared == 4 * 3 * 100
