"""Saving compares files with memory, and loading compares the policy with the manifest: two real DeepSpeed ranks."""

import re
from typing import Any

import pytest
import torch

from tests.fakes.model_digest import digest_of_folder
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import run_warm
from tests.learner.rank.checkpoint_ranks import EXPORT, STAGES, STATE, WEIGHT_NAME

pytestmark = [pytest.mark.stack, pytest.mark.ranks]
Found = dict[Any, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return by ZeRO stage the outcome of each save and load."""
    folder = tmp_path_factory.mktemp("saving")
    make_tiny_model(folder / "model", tied=True, hidden_size=64)
    ended = run_warm("tests.learner.rank.checkpoint_ranks", str(folder), timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = {stage: torch.load(folder / f"stage_{stage}.pt") for stage in STAGES}
    return found | {"digest": digest_of_folder(folder / "model")}


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_weights_receives_them_from_rank_0(found: Found, stage: int) -> None:
    assert found[stage]["broadcast"] == found["digest"]
    assert found[stage]["other models"] == 0.0
    assert found[stage]["bias of a critic"] == -2.25


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("fault", "file", "tensor"),
    [
        ("byte of the state", STATE, "weight/"),
        ("byte of the model", EXPORT, ""),
        ("tensor of the state", STATE, f"weight/{WEIGHT_NAME}"),
        ("moment of the state", STATE, f"exp_avg_sq/{WEIGHT_NAME}"),
        ("tensor of the model", EXPORT, WEIGHT_NAME),
        ("type of a moment", STATE, "exp_avg/"),
    ],
)
def test_a_fault_in_a_file_is_named_with_both_digests(
    found: Found, stage: int, fault: str, file: str, tensor: str
) -> None:
    digest = "[0-9a-f]{32}"
    assert re.match(
        rf"CheckpointMismatchError: .*/\.tmp-step_\d+/{file}: the tensor {tensor}\S* has the digest {digest} in the "
        rf"file and {digest} in memory\. The earlier checkpoints are intact\.",
        found[stage][fault],
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("case", "error"),
    [
        (
            "servers hold older weights",
            r".*/model: the policy has the digest DIGEST, and the rollout servers verified DIGEST for version 2",
        ),
        (
            "weights that did not change",
            r"CheckpointMismatchError: The weights of the policy have the digest DIGEST, as in the checkpoint before, "
            r"although 1 updates were applied since\.",
        ),
        (
            "refused",
            r"RefusedCheckpointError: The checkpoint .*/step_000009 is refused: the policy has the digest DIGEST after "
            r"loading, and the manifest DIGEST\.$",
        ),
    ],
)
def test_weights_with_an_unexpected_digest_are_refused(found: Found, stage: int, case: str, error: str) -> None:
    assert re.match(error.replace("DIGEST", "[0-9a-f]{64}"), found[stage][case])


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_with_a_fault_get_no_name_and_the_newest_right_one_is_loaded(found: Found, stage: int) -> None:
    assert (found[stage]["first"], found[stage]["second"]) == ("saved", "saved")
    assert found[stage]["newest"] == found[stage]["latest"] == "step_000009"
    assert found[stage]["loaded"] == (9, 9)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_other_devices_than_the_first_take_part_in_its_digest(found: Found, stage: int) -> None:
    assert found[stage]["on two kinds of devices"] == (9, 9)
