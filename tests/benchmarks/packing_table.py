"""Which architectures can be trained with several trajectories in one micro-batch: a table, measured.

    python -m tests.benchmarks.packing_table [--seed N] [--short]

A tiny random model of each architecture that is named here goes through the check of a start:
two texts of up to 120 tokens with one prompt and two short ones, by its own code, alone, packed, and with the
prompt computed once. --short: the first six.

holds: every one is as ARCHITECTURES has it. The table of docs/look_up/models.md is what this prints.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from learner.models.settings import PolicySettings
from learner.models.start_check import Comparison, compare
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.policy_settings import small_policy_settings

VOCAB = 64
_BASE: dict[str, Any] = {
    "initializer_range": 0.2,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
# A value has fewer numbers than a key has.
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_ROUTED: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Configuration -> (what it needs besides the base, what a run does with such a model).
EXACT, ALONE, REFUSED = "packs exactly", "one trajectory per micro-batch", "refused"
ARCHITECTURES: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen2Config": ({}, EXACT),
    "Qwen3Config": ({}, EXACT),
    "LlamaConfig": ({}, EXACT),
    "Lfm2Config": ({"layer_types": ["conv", "full_attention"], "block_dim": 32, "conv_dim": 32}, ALONE),
    "OPTConfig": ({"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1}, EXACT),
    "BloomConfig": ({"n_head": 4, "n_layer": 2}, REFUSED),
    "MistralConfig": ({"sliding_window": None}, EXACT),
    "MixtralConfig": ({"num_local_experts": 4}, EXACT),
    "Qwen2MoeConfig": ({**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}, EXACT),
    "Qwen3MoeConfig": ({**_EXPERTS, "num_experts": 4}, EXACT),
    "Glm4MoeConfig": (_ROUTED, EXACT),
    "DeepseekV3Config": ({**_ROUTED, **_LATENT}, EXACT),
    "OlmoConfig": ({}, EXACT),
    "Olmo2Config": ({}, EXACT),
    "Olmo3Config": ({"layer_types": ["full_attention", "full_attention"]}, EXACT),
    "GemmaConfig": ({}, EXACT),
    "Gemma2Config": ({"attn_logit_softcapping": None, "sliding_window": 64}, EXACT),
    "Gemma3TextConfig": ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}, EXACT),
    "PhiConfig": ({}, EXACT),
    "Phi3Config": ({}, EXACT),
    "StableLmConfig": ({}, REFUSED),
    "Starcoder2Config": ({}, EXACT),
    "SmolLM3Config": ({}, EXACT),
    "GraniteConfig": ({}, EXACT),
    "CohereConfig": ({}, EXACT),
    "Glm4Config": ({}, EXACT),
    "Ernie4_5Config": ({}, EXACT),
    "SeedOssConfig": ({}, EXACT),
    "GPT2Config": (_GPT2, EXACT),
    "GPTNeoXConfig": ({}, EXACT),
    "GPTJConfig": ({**_GPT2, "rotary_dim": 4}, REFUSED),
    "GPTNeoConfig": ({"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 4}, REFUSED),
    "GPTBigCodeConfig": (_GPT2, EXACT),
    "CodeGenConfig": ({**_GPT2, "rotary_dim": 4}, REFUSED),
    "FalconConfig": ({"alibi": False, "multi_query": False}, REFUSED),
    "MptConfig": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, REFUSED),
    "GptOssConfig": ({"num_local_experts": 4, "layer_types": ["full_attention", "full_attention"]}, REFUSED),
    "Qwen3NextConfig": ({**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}, ALONE),
    "Qwen3_5TextConfig": (_LINEAR, ALONE),
    "BambaConfig": ({**_MAMBA, "attn_layer_indices": [1]}, ALONE),
    "GraniteMoeHybridConfig": (
        {**_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 64},
        ALONE,
    ),
    "FalconH1Config": ({**_MAMBA, "mamba_d_head": 8, "mamba_d_ssm": 32}, ALONE),
    "MambaConfig": ({"state_size": 8, "expand": 2}, ALONE),
    "Mamba2Config": ({"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2}, ALONE),
}


class OneProcess:
    """A model as a step calls it, without DeepSpeed: the forward pass alone."""

    device = "cpu"

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def main() -> int:
    arguments = options(__doc__ or "")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    names = list(ARCHITECTURES)[: 6 if arguments.short else None]
    counts = dict.fromkeys((EXACT, ALONE, REFUSED), 0)
    others = []
    print("| architecture | a run with it | causal | alone | packed | shared | error |\n|---|---|---|---|---|---|---|")
    for name, outcome, detail in measure(names, arguments.seed):
        print(f"| {name.removesuffix('Config')} | {outcome} | {detail} |", flush=True)
        counts[outcome] += 1
        if outcome != ARCHITECTURES[name][1]:
            others.append(name)
    if others:
        print(f"not as listed: {', '.join(others)}")
    return conclude(
        "packing_table",
        not others,
        architectures=len(names),
        exact=counts[EXACT],
        alone=counts[ALONE],
        refused=counts[REFUSED],
    )


def measure(names: list[str], seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield (architecture, what a run does with it, differences in nats and the error)."""
    for name in names:
        found = comparison_of(name, seed)
        alone, packed = (found.find_fault(is_packed=is_packed, is_shared=True) for is_packed in (False, True))
        outcome = EXACT if packed is None else ALONE if alone is None else REFUSED
        differences = (found.causal, found.alone, found.packed, found.shared)
        yield name, outcome, " | ".join([*(f"{each:.0e}" for each in differences), found.error[:90]])


def comparison_of(name: str, seed: int, num_tokens: int = 120, **others: Any) -> Comparison:
    """Return the check of a start for a tiny random model of the architecture. others: of its configuration."""
    import transformers

    torch.manual_seed(seed)
    # Falcon works its head size out by itself.
    base = {key: value for key, value in _BASE.items() if (name, key) != ("FalconConfig", "head_dim")}
    config = getattr(transformers, name)(**{**base, **ARCHITECTURES[name][0], **others})
    return compare(config, "language model", num_tokens)


def settings_of(folder: Path) -> PolicySettings:
    return small_policy_settings(folder)


if __name__ == "__main__":
    raise SystemExit(main())
