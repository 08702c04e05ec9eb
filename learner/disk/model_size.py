"""How large a model is to train, read from its folder without loading it: parameters, adapters, floats of a token.

No torch here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from learner.disk.model_folder import count_parameters, stored_weights
from protocol.settings.policy import LoraSettings

# Parts of the names of matrices that are no linear layer in memory, or the head, which has no adapter.
_WITHOUT_ADAPTER = ("embed", "lm_head", "wte", "wpe", ".experts.")


@dataclass(frozen=True)
class ModelSize:
    """What memory is planned by."""

    parameters: int  # of the model itself
    adapters: int = 0  # parameters of its LoRA adapters, which alone are trained then; 0: it has none
    num_layers: int = 0  # of the transformer; 0: config.json does not tell, nor the next two
    hidden_size: int = 0  # floats of a token between layers
    # Floats that a layer keeps of each token for its backward pass
    kept_in_layer: int = 0


def read_model_size(model: Path, lora: LoraSettings | None = None) -> ModelSize:
    """Return the size of a model folder's model with these adapters; None and rank 0 are without any."""
    adapters = _count_adapters(model, lora) if lora is not None and lora.rank else 0
    parameters = count_parameters(model)
    config = json.loads((model / "config.json").read_bytes())
    of_text = config.get("text_config")
    return size_of_shape(parameters, {**config, **of_text} if isinstance(of_text, dict) else config, adapters)


def size_of_shape(parameters: int, config: dict[str, Any], adapters: int = 0) -> ModelSize:
    """Return the size of a model of so many parameters, of the shape that a config.json tells."""
    shape = _shape(config)
    if shape is None:
        return ModelSize(parameters, adapters)
    num_layers, hidden_size, query_size, key_size, mlp_size = shape
    # Two norms keep what came in, normalised and weighted; attention its queries, keys, values, answer and what the
    # projection takes; the gated linear layer its gate before and after, its other half, and their product.
    kept = 6 * hidden_size + 3 * query_size + 2 * key_size + 4 * mlp_size
    return ModelSize(parameters, adapters, num_layers, hidden_size, kept)


def _shape(config: dict[str, Any]) -> tuple[int, int, int, int, int] | None:
    """Return (layers, hidden size, size of all queries, of all keys, width of the linear layer inside) or None.

    Of a mixture of experts the width is that of the experts that a token goes through.
    """
    num_layers, hidden_size = config.get("num_hidden_layers"), config.get("hidden_size")
    heads, mlp_size = config.get("num_attention_heads"), config.get("intermediate_size")
    if not all(type(value) is int and value > 0 for value in (num_layers, hidden_size, heads, mlp_size)):
        return None
    assert num_layers is not None
    assert hidden_size is not None
    assert heads is not None
    assert mlp_size is not None
    key_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden_size // heads
    experts, of_expert = config.get("num_experts_per_tok") or 1, config.get("moe_intermediate_size") or mlp_size
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * of_expert
    return num_layers, hidden_size, heads * head_size, key_heads * head_size, of_expert * experts + shared


def _count_adapters(model: Path, lora: LoraSettings) -> int:
    """Return lora.rank times inputs plus outputs of every matrix that is adapted."""
    total = 0
    for name, shape in _stored_shapes(model):
        if len(shape) != 2 or not name.endswith(".weight") or any(part in name for part in _WITHOUT_ADAPTER):
            continue
        if not lora.targets or name.split(".")[-2] in lora.targets:
            total += lora.rank * sum(shape)
    return total


def _stored_shapes(model: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in stored_weights(model):
        with safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):  # safe_open is no mapping
                yield name, tuple(file.get_slice(name).get_shape())
