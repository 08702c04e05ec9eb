"""What vLLM loads in each of its processes: Sluice's weight-transfer engine for CPUs, under the name "gloo".

vLLM calls `register` through the `vllm.general_plugins` entry point of this project, in the server process and again in
every engine and worker process. It may run more than once in one process.
"""

ENGINE_NAME = "gloo"


def register() -> None:
    """Make `WeightTransferConfig(backend="gloo")` known to vLLM; a second call changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, "rollout.weight_receive", "GlooWeightEngine")
