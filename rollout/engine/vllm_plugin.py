"""What vLLM loads in each of its processes: Sluice's weight-transfer engines and calls, leave to use AMX, words when it
dies, and an end together with the server.

vLLM calls `register` through the `vllm.general_plugins` entry point of this project, in the server process and again in
every engine and worker process. It may run more than once in one process.
"""

import faulthandler
import multiprocessing
import os
import threading

from rollout.engine.core_calls import add_calls
from rollout.engine.process_facts import allow_matrix_tiles

_CLASS_NAMES = {
    "gloo": "GlooWeightEngine",
    "gloo_in_place": "GlooInPlaceEngine",
    "sluice_nccl": "NcclWeightEngine",  # vLLM has a "nccl" and an "ipc" of its own
    "sluice_ipc": "SameMachineEngine",
}
_WATCHER = "server-watcher"


def register() -> None:
    """Make our engines known to vLLM, which imports `rollout.engine.weights.receive` when one is used; repeatable."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCore

    for name, class_name in _CLASS_NAMES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "rollout.engine.weights.receive", class_name)
    add_calls(EngineCore, EngineCoreRequestType.WAKEUP)
    prepare_process()


def engine_name(backend: str, second_copy: bool) -> str:
    """Return what `WeightTransferConfig(backend=...)` calls the engine that receives pushes like this."""
    if backend == "gloo":
        return "gloo" if second_copy else "gloo_in_place"
    return f"sluice_{backend}"


def prepare_process() -> None:
    """Have this process of vLLM's run what the CPU can, say what killed it, and end together with the server."""
    allow_matrix_tiles()
    if multiprocessing.parent_process() is not None:
        faulthandler.enable()  # a signal that ends this process leaves its name and the stack in the server's log
        _end_with_the_server()


def _end_with_the_server() -> None:
    """In a process that vLLM started, watch its starter: a server that was killed would leave it running for ever.

    vLLM's processes end on a signal from a server that shuts down, which one killed by SIGKILL never sends; each
    left-over holds its memory, on a GPU all of the card.
    """
    server = multiprocessing.parent_process()
    if server is None or any(thread.name == _WATCHER for thread in threading.enumerate()):
        return

    def watch() -> None:
        server.join()
        os._exit(1)

    threading.Thread(target=watch, name=_WATCHER, daemon=True).start()
