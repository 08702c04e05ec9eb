"""Which reference a run has: a model of its own, in checkpoints or not, or the base under the policy's adapters."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from learner.checkpoint.manifest import Checkpoint
from learner.models.reference import BaseReference, ReferenceModel
from learner.models.world import join_world
from learner.rank.start import _reference
from protocol.settings.settings import Settings
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_model

LORA = {"policy": {"lora": {"rank": 4}}}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A world of one rank."""
    join_world(0, 1, "127.0.0.1", free_port(), 60.0)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tied=True, hidden_size=32, num_layers=1)


def chosen(model: Path, checkpoint: Checkpoint | None = None, **sections: Any) -> ReferenceModel | BaseReference | None:
    settings = Settings.model_validate({"kl": {"coefficient": 0.1}, **sections})
    return _reference(settings, model, cast(Any, SimpleNamespace(vocab_size=272)), checkpoint, lambda phase: None)


def checkpoint_with_a_reference(folder: Path) -> Checkpoint:
    (folder / "state" / "reference").mkdir(parents=True)
    return Checkpoint(folder, step=1, policy_version=1, run_id="r", model_digest="d")


def test_there_is_no_reference_without_a_kl(model: Path) -> None:
    assert chosen(model, kl={"coefficient": 0.0}) is None


def test_policy_with_adapters_is_its_own_reference(model: Path) -> None:
    assert isinstance(chosen(model, **LORA), BaseReference)


@pytest.mark.parametrize(
    ("sections", "is_kept"),
    [
        ({}, False),
        ({"reference": {"refresh_every_steps": 2}}, True),
        (LORA | {"reference": {"refresh_every_steps": 2}}, True),
    ],
)
def test_other_references_are_models_that_checkpoints_keep_unless_a_folder_has_them(
    model: Path, sections: dict[str, Any], is_kept: bool
) -> None:
    reference = chosen(model, **sections)
    assert isinstance(reference, ReferenceModel)
    assert reference.is_kept == is_kept


@pytest.mark.parametrize("sections", [{}, LORA])
def test_reference_of_a_checkpoint_stays_in_later_ones_without_a_refresh(
    model: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    reference = chosen(model, checkpoint_with_a_reference(tmp_path), **sections)
    assert isinstance(reference, ReferenceModel)
    assert reference.is_kept
