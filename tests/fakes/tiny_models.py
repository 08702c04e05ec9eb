"""Small models of random weights, made on the spot: every test and benchmark that needs one has it from here.

`make_tiny_model(folder, tied=True)` writes what a user's model folder holds: weights, config and tokenizer.
`tiny_config` is the form of one that is needed in memory alone.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from protocol.settings.run_spec import EngineRequest
from tests.fakes.tool_models import byte_core

TAGS = ("<pad>", "<eos>", "<search>", "</search>", "<answer>", "</answer>")


def make_tiny_model(
    folder: Path,
    *,
    tied: bool,
    hidden_size: int = 128,
    num_layers: int = 2,
    vocab_size: int = 272,
    seed: int = 0,
    max_positions: int = 1024,
    width: float = 0.1,
) -> Path:
    """Return `folder`, now holding a random Qwen2 model in float32 and its tokenizer.

    The defaults have 0.46M parameters tied and 0.50M untied. width: deviation of the weights; 0.1 is ten times the
    usual, so that distributions are far from flat and a stale weight anywhere moves logprobs by far more than 1e-3.
    """
    torch.manual_seed(seed)
    config = tiny_config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=width,
        torch_dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_config(**changes: Any) -> Qwen2Config:
    """Return the form of a Qwen2 of two layers, with these values in place of the usual ones.

    Heads have 32 numbers, the layers between are three times as wide as a token, unless the changes say otherwise.
    """
    hidden_size = changes.get("hidden_size", 128)
    heads = changes.get("num_attention_heads", hidden_size // 32)
    usual: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 3 * hidden_size,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return Qwen2Config(**{**usual, **changes})


def make_tiny_mixture(folder: Path) -> Path:
    """Return `folder`, now holding a random Qwen3 mixture of four experts, two for each token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=272,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        torch_dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte after six tags: 262 tokens, no merges."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_core(*TAGS),
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(TAGS[2:]),
    )


def engine_of(
    folder: Path | str,
    dtype: Literal["float32", "bfloat16"] = "float32",
    *,
    second_copy: bool = True,
    engine_args: dict[str, Any] | None = None,
) -> EngineRequest:
    """Return an engine for a tiny model on the CPU."""
    return EngineRequest(
        model=str(folder),
        dtype=dtype,
        tensor_parallel_size=1,
        seed=0,
        max_model_len=512,
        trust_remote_code=False,
        weights_backend="gloo",
        second_copy=second_copy,
        engine_args=engine_args or {},
    )


async def start_loaded(request: EngineRequest, version: int | None = None) -> Any:
    """Return an engine that has loaded the weights of its model folder. version: what it serves; None: nothing yet."""
    from rollout.engine.engine import Engine

    load = {**request.engine_args, "load_format": "auto"}
    engine = await Engine.start(request.model_copy(update={"engine_args": load}))
    if version is not None:
        await serve_loaded(engine, version)
    return engine


async def serve_loaded(engine: Any, version: int) -> None:
    """Serve the loaded weights as this version, without a push."""
    await engine._llm.update_weight_version(str(version))
    engine.policy_version = version
