"""Sluice's plugin in each of vLLM's processes: weight-transfer engines, a call of workers, AMX, an orderly end.

vLLM calls `register` through the `vllm.general_plugins` entry point of this project, in the server process and in every
engine and worker process. It may run more than once in one process.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

_CLASS_NAMES = {
    "gloo": "GlooWeightEngine",
    "gloo_in_place": "GlooInPlaceEngine",
    "sluice_nccl": "NcclWeightEngine",  # vLLM has its own "nccl" and "ipc"
    "sluice_ipc": "SameMachineEngine",
}
HAS_RECEIVED = "sluice_has_received"
_WATCHER = "server-watcher"
_ARCH_PRCTL = 158  # number of the system call on x86-64
_REQUEST_STATE = 0x1023  # ARCH_REQ_XCOMP_PERM
_TILE_DATA = 18  # state that AMX instructions use


class WorkerCalls:
    """Methods that vLLM adds to its workers (`worker_extension_cls`)."""

    weight_transfer_engine: Any

    def sluice_has_received(self) -> bool:
        """Return whether this worker has the last bucket of the push. Raises: the error that stopped the push."""
        receiving = self.weight_transfer_engine.receiving()
        return bool(receiving.done() and receiving.result() is not None)


class ChildProcess(Protocol):
    """The part of `multiprocessing.Process` that shows how a process ended."""

    @property
    def name(self) -> str: ...
    @property
    def exitcode(self) -> int | None: ...


def register() -> None:
    """Register our engines with vLLM; repeatable."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, class_name in _CLASS_NAMES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "rollout.engine.weights.receive", class_name)
    _rotate_heads_apart()
    prepare_process()


def _rotate_heads_apart() -> None:
    """Make vLLM's rotation on CPUs right for a query with a dimension of heads, such as one of latent attention (MLA).

    Its kernel for CPUs expects heads side by side in one dimension; other queries come out wrong, by 0.1 to 0.2 nats.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu
    if rotate.__module__ == __name__:  # replaced before
        return

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        flat = [None if each is None else each.reshape(positions.numel(), -1) for each in (query, key)]
        for given, rotated in zip((query, key), rotate(self, positions, *flat), strict=True):
            if given is not None and given.dim() > 2:
                given.copy_(rotated.view(given.shape))
        return query, key

    RotaryEmbedding.forward_cpu = forward_cpu


def engine_name(backend: str, second_copy: bool) -> str:
    """Return the engine's name for `WeightTransferConfig(backend=...)`."""
    if backend == "gloo":
        return "gloo" if second_copy else "gloo_in_place"
    return f"sluice_{backend}"


def prepare_process() -> None:
    """Allow AMX in this vLLM process, make it log fatal signals, and end it together with the server."""
    allow_matrix_tiles()
    if multiprocessing.parent_process() is not None:
        faulthandler.enable()  # writes the stack of a process that a signal ends to the server's log
        _end_with_the_server()


def allow_matrix_tiles(syscall: Callable[[int, int, int], int] | None = None) -> None:
    """Ask Linux to let this process use AMX, which bfloat16 attention on CPUs uses. A refusal is ignored.

    Without permission the first AMX instruction ends the process by SIGILL. syscall: replacement of the C library's.
    """
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        (syscall or ctypes.CDLL(None).syscall)(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)


def processes_of(llm: Any) -> tuple[ChildProcess, ...]:
    """Return the processes that vLLM started for this engine. vLLM drops its references when they end."""
    started = llm.engine_core.resources.engine_manager
    return tuple(started.processes) if started is not None else ()


def describe_endings(processes: Iterable[ChildProcess]) -> str:
    """Return how the ended processes among these ended. Example: "EngineCore died by SIGILL"."""
    return ", ".join(_ending(process.name, code) for process in processes if (code := process.exitcode) is not None)


def _ending(name: str, code: int) -> str:
    if code >= 0:
        return f"{name} ended with exit status {code}"
    try:
        return f"{name} died by {signal.Signals(-code).name}"
    except ValueError:
        return f"{name} died by signal {-code}"


def _end_with_the_server() -> None:
    """End this process, which vLLM started, when the server ends: a server killed by SIGKILL does not signal it."""
    server = multiprocessing.parent_process()
    if server is None or any(thread.name == _WATCHER for thread in threading.enumerate()):
        return

    def watch() -> None:
        server.join()
        os._exit(1)

    threading.Thread(target=watch, name=_WATCHER, daemon=True).start()
