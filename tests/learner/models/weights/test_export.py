"""An exported model is the model folder again: the same names, and all that the model keeps."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from learner.models.model_loading import load_model
from learner.models.weights.export import export_model
from tests.benchmarks.packing_table import _BASE, ARCHITECTURES, settings_of


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)


# A router's bias that no gradient reaches; experts that are one tensor in memory; a head of another name there.
@pytest.mark.parametrize(
    ("architecture", "shard_bytes"), [("Glm4MoeConfig", 20_000), ("MixtralConfig", 1 << 30), ("GPTNeoXConfig", 1 << 30)]
)
def test_exported_model_has_every_tensor_of_the_model_folder_under_its_name(
    tmp_path: Path, architecture: str, shard_bytes: int
) -> None:
    source, folder = tmp_path / "source", tmp_path / "export"
    config = getattr(transformers, architecture)(**{**_BASE, **ARCHITECTURES[architecture][0]})
    made: Any = transformers.AutoModelForCausalLM.from_config(config).float()
    for buffer in made.buffers():
        buffer.data = torch.rand_like(buffer)
    made.save_pretrained(source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    model = load_model(settings_of(source))

    export_model(folder, source, model, lambda tensors: nullcontext(), torch.Tensor.numel, shard_bytes)

    expected = load_file(source / "model.safetensors")
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if shard_bytes < 1 << 30:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
