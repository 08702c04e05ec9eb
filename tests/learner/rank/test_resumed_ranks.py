"""A run with critic, adaptive KL and several updates a step goes on with other ranks and stages: DeepSpeed for real."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import run_warm
from tests.learner.models.small_policy import flat
from tests.learner.rank.resumed_ranks import READERS, WRITERS

pytestmark = [pytest.mark.stack, pytest.mark.ranks]
PAIRS = [(writer, reader) for writer in WRITERS for reader in READERS if writer.split()[0] == reader.split()[0]]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what each writer found, and what each reader found by writer."""
    folder = tmp_path_factory.mktemp("resumed")
    make_tiny_model(folder / "model", tied=True, hidden_size=64, num_layers=1)
    ended = run_warm("tests.learner.rank.resumed_ranks", str(folder), timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {name: torch.load(folder / f"{name}.pt") for name in (*WRITERS, *READERS, "evaluated")}


def test_run_without_training_loads_no_optimizer_critic_or_reference(found: Found) -> None:
    assert found["evaluated"]["others"] == [None, None]
    assert found["evaluated"]["optimizer"] is None
    assert found["evaluated"]["num_logprobs"] > 0
    assert len(found["evaluated"]["digest"]) == 64


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return float((flat(found) - flat(expected)).norm() / flat(expected).norm())


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_resume_with_other_ranks_and_stages_equals_an_uninterrupted_run(found: Found, writer: str, reader: str) -> None:
    expected, of_pair = found[writer], found[reader][writer]
    for role in ("policy", "critic"):
        assert distance(of_pair["weights"][role], expected["weights"][role]) < 1e-6
    assert of_pair["memory"] == pytest.approx(expected["memory"], rel=1e-6)


def test_critic_in_another_stage_than_the_policy_trains_as_on_one_rank(found: Found) -> None:
    for role in ("policy", "critic"):
        assert distance(found["whole 2"]["weights"][role], found["whole 1"]["weights"][role]) < 1e-6


@pytest.mark.parametrize("writer", WRITERS)
def test_memory_of_the_objective_has_changed(found: Found, writer: str) -> None:
    memory = found[writer]["memory"]
    assert memory["reward_count"] == 3 * 12
    assert abs(memory["kl_coefficient"] - 0.05) > 0.001


@pytest.mark.parametrize("name", ["whole 2", "lora 2"])
def test_reference_is_the_first_model_or_the_base_of_the_adapters(found: Found, name: str) -> None:
    torch.testing.assert_close(found[name]["reference"], found["whole 1"]["reference"], rtol=0, atol=1e-5)


def test_adapters_are_the_policys_alone(found: Found) -> None:
    assert all(".lora_" in name for name in found["lora 2"]["weights"]["policy"])
    assert not any(".lora_" in name for name in found["lora 2"]["weights"]["critic"])
