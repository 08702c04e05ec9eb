"""What vLLM loads in each of its processes: Sluice's weight-transfer engines.

vLLM calls `register` through the `vllm.general_plugins` entry point of this project, in the server process and again in
every engine and worker process. It may run more than once in one process.
"""

ENGINE_NAMES = {"gloo": "gloo", "nccl": "sluice_nccl"}
"""Our weights.backend -> the name in `WeightTransferConfig(backend=...)`."""

_CLASS_NAMES = {"gloo": "GlooWeightEngine", "nccl": "NcclWeightEngine"}


def register() -> None:
    """Make both engines known to vLLM, which imports `rollout.weight_receive` when one is used; repeatable."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for backend, name in ENGINE_NAMES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "rollout.weight_receive", _CLASS_NAMES[backend])
