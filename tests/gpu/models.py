"""Random models of known shapes, and trajectories for them, for parts that need no trained weights.

Shapes: T tokens of a trajectory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch


@dataclass(frozen=True)
class Shape:
    """A Qwen2-like model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool


TINY = Shape(64, 2, 2, 1, 128, 512, True)
# Sizes of the published Qwen2.5 models of 0.5B, 1.5B and 7B parameters (their config.json).
SHAPES = {
    "0.5B": Shape(896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": Shape(1536, 28, 12, 2, 8960, 151_936, True),
    "7B": Shape(3584, 28, 28, 4, 18_944, 152_064, False),
}


def write_folder(folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Return `folder`, now holding a random Qwen2 of this shape and a tokenizer of bytes."""
    from transformers import Qwen2ForCausalLM

    from tests.fakes.tiny_models import byte_tokenizer

    Qwen2ForCausalLM(_config(shape)).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def random_model(shape: Shape, device: str, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """Return a Qwen2 of this shape with random weights, made where it stays, as a rank prepares it."""
    from transformers import Qwen2ForCausalLM

    from learner.models import varlen_attention
    from learner.models.scoring.scored_model import make_scored

    varlen_attention.register()
    config = _config(shape, attn_implementation=varlen_attention.NAME)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(seed)
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    make_scored(model)
    return model


def _config(shape: Shape, **changes: Any) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=32_768,
        eos_token_id=1,
        pad_token_id=0,
        **changes,
    )


def trajectories(lengths: list[int], vocabulary: int, *, seed: int = 0) -> MicroBatch:
    """Return a micro-batch of random trajectories whose second halves the model wrote, advantages of either sign."""
    draw = np.random.default_rng(seed)
    return make_micro_batch(
        [
            LearnerSample(
                draw.integers(0, vocabulary, length).astype(np.int32),
                np.arange(length) >= max(1, length // 2),
                np.full(length, -np.log(vocabulary), np.float32),
                advantage=float(draw.normal()),
            )
            for length in lengths
        ]
    )


def copied(model: Any, device: str, dtype: torch.dtype, shape: Shape) -> Any:
    """Return the same model elsewhere, or of another type."""
    other = random_model(shape, device, dtype)
    other.load_state_dict({name: tensor.to(device, dtype) for name, tensor in model.state_dict().items()})
    return other
