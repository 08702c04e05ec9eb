"""What `--plan` says of a rank's memory beside what a model really takes, on this machine's CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.disk.model_folder import read_model_size
from learner.models.gradient import score_tokens
from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.model_loading import load_model
from learner.plan.memory import activation_bytes
from protocol.settings.settings import Settings
from tests.benchmarks.packing_table import OneProcess, settings_of
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.plan.measured_ranks import tracked

NUM_TOKENS = 256


def planned(folder: Path, dtype: str, *, gradient_checkpointing: bool) -> int:
    learner = {"micro_batch_tokens": NUM_TOKENS, "gradient_checkpointing": gradient_checkpointing}
    rollout = {"max_context_tokens": NUM_TOKENS, "max_response_tokens": 16}
    given = Settings.model_validate({"policy": {"dtype": dtype}, "learner": learner, "rollout": rollout})
    return activation_bytes(read_model_size(folder), given)


def measured(folder: Path, dtype: Any, *, gradient_checkpointing: bool) -> int:
    settings = replace(settings_of(folder), dtype=dtype, gradient_checkpointing=gradient_checkpointing)
    model = load_model(settings)
    tokens = np.random.default_rng(0).integers(0, 262, NUM_TOKENS).astype(np.int32)
    sample = LearnerSample(tokens, np.arange(NUM_TOKENS) > 0, np.zeros(NUM_TOKENS, np.float32))
    micro_batch = make_micro_batch([sample])
    with tracked() as found:
        scores = score_tokens(OneProcess(model), micro_batch, 1.0, with_entropy=False)[0]
    assert scores.requires_grad  # it keeps what its backward pass needs
    return found.live


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(folder, tied=True, hidden_size=896, num_layers=3)  # as wide as 0.5B


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_what_a_forward_pass_keeps(folder: Path, dtype: str) -> None:
    found = measured(folder, dtype, gradient_checkpointing=False)
    assert planned(folder, dtype, gradient_checkpointing=False) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_keeps_what_comes_into_each_layer_and_one_layers_own_is_planned_besides(
    folder: Path, dtype: str
) -> None:
    found = measured(folder, dtype, gradient_checkpointing=True)
    one_layer = planned(folder, dtype, gradient_checkpointing=False) // 3
    # What the norm before the head keeps is there before any layer is computed again: the same place is planned once.
    assert planned(folder, dtype, gradient_checkpointing=True) - one_layer < found
    assert found < planned(folder, dtype, gradient_checkpointing=True)
