"""Time of one more expert's tensor in a push: packing, both digests, message and vLLM's load, in this process.

    python -m tests.benchmarks.expert_tensors [--layers N]

A mixture of 128 tiny experts against one of 8; the difference leaves out what a layer takes. Figures are process time.
"""

import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from learner.models.weights.pushed import PushedWeights
from learner.weights.feed import BucketMemory, pack
from protocol.weights.digest import WeightDigest
from protocol.weights.wire import update_message
from tests.chaos.rig.verdict import options

_NUM_PUSHES = 8
_EXPERTS = (8, 128)


def main() -> int:
    asked = options(__doc__ or "", layers=6)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    few, many = (_push_s(asked.layers, number) for number in _EXPERTS)
    each = (many - few) / (3 * asked.layers * (_EXPERTS[1] - _EXPERTS[0]))
    print(
        f"expert_tensors microseconds={each * 1e6:.1f} push_ms={many * 1e3:.1f} without_ms={few * 1e3:.1f}", flush=True
    )
    return 0


def _push_s(num_layers: int, num_experts: int) -> float:
    """Return the fastest push of a mixture, in seconds of this process."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from vllm import LLM
    from vllm.config import set_current_vllm_config

    from rollout.engine.weights.receive import InPlaceLoad, WeightUpdate
    from rollout.engine.weights.reload import drop_expert_kernels

    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 8}
    config = Qwen3MoeConfig(**shape, **heads, num_hidden_layers=num_layers, num_experts=num_experts)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(Path(folder))
        engine = LLM(folder, enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4)
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker
    model, engine_config = worker.get_model(), worker.model_runner.vllm_config
    pushed = PushedWeights(
        policy, lambda _: nullcontext(), lambda part: tuple(part.shape), dtype=None, bucket_bytes=1 << 24
    )
    load, fastest = InPlaceLoad(), float("inf")
    for _ in range(_NUM_PUSHES):
        started, digest = time.process_time(), WeightDigest(pushed.plan)
        flats = [
            flat.clone() for flat in pack(pushed.plan, pushed.buckets(is_sender=True), BucketMemory(pushed.plan, "cpu"))
        ]
        for flat in flats:
            digest.add(flat)
        left = iter(flats)
        with set_current_vllm_config(engine_config), torch.no_grad():
            drop_expert_kernels(model)
            load.begin(model, engine_config.model_config)
            load.take(WeightUpdate(update_message(pushed.plan)), "cpu", lambda flat, left=left: flat.copy_(next(left)))
            load.take(WeightUpdate(expected_digest=digest.hexdigest()), "cpu", lambda flat: None)
            load.end()
        fastest = min(fastest, time.process_time() - started)
    return fastest


if __name__ == "__main__":
    sys.exit(main())
