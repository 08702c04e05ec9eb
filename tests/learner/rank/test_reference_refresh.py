"""A reference that is refreshed becomes the policy, whatever the model has, or is refused at the start."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from learner.models.model_loading import load_model
from learner.models.reference import ReferenceModel
from learner.models.weights.pushed import weights_of
from learner.models.world import join_world
from learner.rank.start import load_roles
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from tests.benchmarks.packing_table import _BASE, ARCHITECTURES, settings_of
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import byte_tokenizer, make_tiny_model


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A world of one rank."""
    join_world(0, 1, "127.0.0.1", free_port(), 60.0)
    yield
    dist.destroy_process_group()


def test_bias_of_a_router_that_is_a_buffer_is_copied_too(tmp_path: Path) -> None:
    given = {**_BASE, "vocab_size": 272, **ARCHITECTURES["DeepseekV3Config"][0]}
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**given)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = load_model(settings_of(tmp_path))
    with torch.no_grad():
        for tensor in (*model.parameters(), *(each for name, each in model.named_buffers() if "bias" in name)):
            tensor.add_(1.0)
    policy: Any = SimpleNamespace(merged_weights=lambda: weights_of(model), gather=lambda tensors: nullcontext())
    reference = ReferenceModel(settings_of(tmp_path), is_offloaded=False, is_kept=True)
    reference.refresh(policy)
    expected, found = model.state_dict(), reference._model.state_dict()
    assert any("e_score_correction_bias" in name for name in expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("is_policy_tied", [False, True])
def test_reference_in_another_form_is_refused(tmp_path: Path, is_policy_tied: bool) -> None:
    policy = make_tiny_model(tmp_path / "policy", tied=is_policy_tied, hidden_size=32, num_layers=1)
    other = make_tiny_model(tmp_path / "other", tied=not is_policy_tied, hidden_size=32, num_layers=1)
    with pytest.raises(OperatorError, match=r"config.json has another tie_word_embeddings than the policy's: the copy"):
        load_refreshed(policy, other)


def test_reference_of_the_policys_form_is_taken(tmp_path: Path) -> None:
    policy, other = (make_tiny_model(tmp_path / name, tied=True, hidden_size=32, num_layers=1) for name in "po")
    file = other / "config.json"
    changed = {"_name_or_path": "x", "use_cache": False, "pad_token_id": 3, "torch_dtype": "bfloat16"}
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changed))
    load_refreshed(policy, other)


def load_refreshed(policy: Path, reference: Path) -> None:
    sections = {
        "policy": {"model": str(policy), "dtype": "float32"},
        "kl": {"coefficient": 0.1},
        "reference": {"model": str(reference), "refresh_every_steps": 1},
    }
    folders = {"policy.model": policy, "reference.model": reference}
    load_roles(Settings.model_validate(sections), folders, None, lambda phase: None)
