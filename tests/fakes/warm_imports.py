"""Imported ahead by the process that `tests.fakes.warm_process` copies: what most commands of the tests import."""

import gc
import os
from importlib import import_module

# Before torch and numpy are loaded: a copy has none of the threads that they would start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read at its import by huggingface_hub: whether the hub can be reached must not matter to a test.
os.environ["HF_HUB_OFFLINE"] = "1"

_NAMES = (
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "learner.audit",
    "learner.coordinator.process",
    "learner.rank.rank",
    "learner.rank.start",
    "rollout.server",
)

for _name in _NAMES:
    import_module(_name)
import_module("learner.models.training.deepspeed_config").import_deepspeed()
gc.collect()
gc.freeze()  # a copy neither scans these objects nor counts them as its own
