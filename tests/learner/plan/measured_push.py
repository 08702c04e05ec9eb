"""What `--plan` says that a push adds to a server, beside the peak of torch's allocations in vLLM's real loading.

    python -m tests.learner.plan.measured_push [--only NAME]

Each case is one vLLM engine of random bfloat16 weights on CPUs. It takes two pushes in place, in buckets of
16 MiB: one as on a GPU, and one in which it packs the experts for the CPU. One layer is loaded at a time.
holds: each plan is within 5 % of the peak.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.disk.model_folder import read_model_size
from learner.models.weights.pushed import PushedWeights
from learner.plan.memory import push_bytes
from protocol.settings.settings import Settings
from protocol.weights.digest import WeightDigest
from protocol.weights.wire import Bucket, bucket_num_bytes, update_message
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import byte_tokenizer
from tests.learner.models.forked_world import run_world
from tests.learner.plan.measured_ranks import tracked

BUCKET_BYTES = 16 << 20
_DENSE = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
_MIXTURE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512, "num_experts_per_tok": 4}
_LARGE = {"hidden_size": 1024, "num_experts": 8, "moe_intermediate_size": 512, "vocab_size": 151_936}
# Configurations of two layers each: experts larger and smaller than the embedding, one bucket and many.
CASES: dict[str, dict[str, Any]] = {
    "dense, 0.5B": {**_DENSE, "vocab_size": 151_936},
    "64 experts of 3 x 1024 x 256": {**_MIXTURE, "hidden_size": 1024, "num_experts": 64, "moe_intermediate_size": 256},
    "64 experts of 3 x 1024 x 768": {**_MIXTURE, "hidden_size": 1024, "num_experts": 64, "moe_intermediate_size": 768},
    "16 experts of 3 x 2048 x 1024": {
        **_MIXTURE,
        "hidden_size": 2048,
        "num_experts": 16,
        "moe_intermediate_size": 1024,
    },
    "8 experts of 3 x 1024 x 512 and a large embedding": {**_MIXTURE, **_LARGE},
}


def write_model(folder: Path, config: dict[str, Any]) -> Any:
    """Return a random model of two layers, now also in this folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {"vocab_size": 4096, "num_hidden_layers": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    if "num_experts" in config:
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**common, **config}))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**{**common, **config}))
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def zero_digest(plan: Sequence[Bucket]) -> str:
    digest = WeightDigest(plan)
    for bucket in plan:
        digest.add(torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8))
    return digest.hexdigest()


def measure(folder: Path, config: dict[str, Any]) -> dict[bool, int]:
    """Return what a push added to this process at most, in bytes: True: as on a GPU; False: on a CPU."""
    model = write_model(folder, config)
    plan = PushedWeights(
        model, lambda _: nullcontext(), lambda weight: tuple(weight.shape), dtype="bfloat16", bucket_bytes=BUCKET_BYTES
    ).plan
    digest = zero_digest(plan)
    del model
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM

    from rollout.engine.weights.receive import InPlaceLoad, WeightUpdate, drop_expert_kernels

    engine: Any = LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=4)
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    peaks = {}
    for on_gpus in (True, False):
        load = InPlaceLoad()
        with tracked() as push:
            if not on_gpus:
                drop_expert_kernels(runner.model)
            load.begin(runner.model, runner.model_config)
            load.take(WeightUpdate(update_message(plan)), "cpu", Tensor.zero_)
            load.take(WeightUpdate(expected_digest=digest), "cpu", Tensor.zero_)
            load.end()
        peaks[on_gpus] = push.peak
    return peaks


def main() -> int:
    arguments = options(__doc__ or "", only="")
    worst = 0.0
    for name in [arguments.only] if arguments.only else CASES:
        with tempfile.TemporaryDirectory() as place:
            run_world(1, Path(place), "found", lambda root: measure(root / "model", CASES[name]), 300)  # noqa: B023
            found = torch.load(Path(place) / "found.pt")
            size = read_model_size(Path(place) / "model")
        for on_gpus, peak in found.items():
            settings = Settings.model_validate({"policy": {"dtype": "bfloat16"}})
            planned = push_bytes(settings, size, BUCKET_BYTES, on_gpus=on_gpus)
            worst = max(worst, abs(planned / peak - 1.0))
            kind = "as on a GPU" if on_gpus else "on a CPU"
            print(f"| {name} {kind} | {planned / 1e6:,.1f} | {peak / 1e6:,.1f} | {planned / peak:.3f} |", flush=True)
    return conclude("measured_push", worst <= 0.05, worst=worst)


if __name__ == "__main__":
    sys.exit(main())
