"""Pushes to vLLM engines of many model families that start with dummy weights, compared with transformers.

    python -m tests.chaos.model_families [--families qwen2,mamba2,...] [--seed N] [--short]

Each family is a tiny random model in a vLLM engine of its own process. The engine starts without the model's weights.
Three pushes change all weights. A family takes about 15 s.
--short: mamba2, which has a buffer that is a view of a parameter.

holds: after each push every logprob of a prompt differs by at most 1e-4 nats from transformers' with the same weights.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.chaos.rig.verdict import conclude, options

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_USUAL = {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {**_USUAL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_USUAL, "head_dim": 32}),
    "llama": ("LlamaConfig", {**_USUAL, "attention_bias": True, "mlp_bias": True}),
    "gemma2": ("Gemma2Config", {**_USUAL, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {**_USUAL, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "phi3": ("Phi3Config", _USUAL),
    "cohere": ("CohereConfig", _USUAL),
    "falcon": ("FalconConfig", {}),
    "gpt2": ("GPT2Config", {"n_positions": 512, "n_embd": 128, "n_layer": 3, "n_head": 4}),
    "opt": ("OPTConfig", {"ffn_dim": 128, "max_position_embeddings": 512, "word_embed_proj_dim": 128}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16, "expand": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_USUAL, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 3},
    ),
    "mixtral": ("MixtralConfig", {**_USUAL, "num_local_experts": 4}),
}
_TOLERANCE = 1e-4
_PROMPT = [20, 21, 14, 22, 23, 32, 40, 41, 90, 17, 250, 100] * 2
_NUM_PUSHES, _WIDTH, _BUCKET_BYTES = 3, 0.02, 1 << 15
_LIMIT_S = 240.0


def main() -> int:
    asked = options(__doc__ or "", families=",".join(_FAMILIES))
    families = ["mamba2"] if asked.short else asked.families.split(",")
    num_held = 0
    for family in families:
        command = [sys.executable, "-m", "tests.chaos.model_families", "--one", family, str(asked.seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        told = [line for line in done.stdout.splitlines() if line.startswith(f"{family}: ")]
        print("\n".join(told) or f"{family}: {done.stderr[-400:]}", flush=True)
        num_held += done.returncode == 0
    return conclude("model_families", num_held == len(families) > 0, families=len(families), held=num_held)


def _try(family: str, seed: int) -> bool:
    """Push to one family's engine, in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_HOST_IP="127.0.0.1",
        HF_HUB_OFFLINE="1",
    )
    import torch
    import transformers

    from tests.fakes.tiny_models import byte_tokenizer

    torch.manual_seed(seed)
    config_name, special = _FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config_name)(**_COMMON | special)
    ).eval()
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        byte_tokenizer().save_pretrained(name)
        engine = _engine(name)
        holds = True
        for _ in range(_NUM_PUSHES):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(_WIDTH * torch.randn_like(parameter))
            before = _logprobs(engine)
            receiver = engine.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
            receiver.load_received(list(_buckets(model, Path(name) / "pushed")))
            after = _logprobs(engine)
            moved, difference = (float((after - other).abs().max()) for other in (before, _expected(model)))
            print(f"{family}: {moved=:.2f} {difference=:.1e}", flush=True)
            holds &= difference <= _TOLERANCE < moved
        return holds


def _engine(folder: str) -> Any:
    """Return an engine in this process, with dummy weights."""
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    from rollout.engine.vllm_plugin import engine_name, register

    register()
    return LLM(
        model=folder,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        weight_transfer_config=WeightTransferConfig(backend=engine_name("gloo", True)),
    )


def _buckets(model: Any, folder: Path) -> Any:
    """Yield the weights as their checkpoint names them, in buckets."""
    import torch
    from safetensors.torch import load_file

    from protocol.weights.wire import TensorMeta, bucket_num_bytes
    from tests.fakes.planned_weights import bucket_views, plan_buckets

    model.save_pretrained(folder)
    named = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    metas = [TensorMeta(name, str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in named.items()]
    for bucket in plan_buckets(metas, _BUCKET_BYTES):
        flat = torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8)
        for name, view in bucket_views(flat, bucket):
            view.copy_(named[name])
        yield bucket, flat


def _logprobs(engine: Any) -> Any:
    import torch
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (answer,) = engine.generate([{"prompt_token_ids": _PROMPT}], sampling, use_tqdm=False)
    return torch.tensor([at[token].logprob for at, token in zip(answer.prompt_logprobs[1:], _PROMPT[1:], strict=True)])


def _expected(model: Any) -> Any:
    import torch

    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([_PROMPT]), use_cache=False).logits[0], -1)
    return logprobs[torch.arange(len(_PROMPT) - 1), _PROMPT[1:]]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        held = _try(sys.argv[2], int(sys.argv[3]))
        sys.stdout.flush()
        os._exit(0 if held else 1)  # an engine in this process leaves threads behind
    sys.exit(main())
