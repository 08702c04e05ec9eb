"""How busy this machine and its NVIDIA GPUs are, right now."""

import importlib
import os
from typing import Any, TypedDict

import psutil


class GpuLoad(TypedDict):
    """One GPU as its driver (NVML) tells it."""

    name: str  # of the card
    used_bytes: int  # of its memory, by all processes
    total_bytes: int  # of its memory
    busy_percent: int  # of the last second or less during which a kernel ran


class MachineLoad(TypedDict):
    """One node's machine."""

    num_cores: int  # that programs may use
    load: float  # processes that ran or wanted to, mean of a minute
    used_bytes: int  # of host memory: what programs could not have
    total_bytes: int  # of host memory
    gpus: list[GpuLoad]  # none where there is no driver


def machine_load() -> MachineLoad:
    """Return what this machine does. In a container its memory and load are those of the host."""
    memory = psutil.virtual_memory()
    return MachineLoad(
        num_cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        used_bytes=memory.total - memory.available,
        total_bytes=memory.total,
        gpus=_gpus(),
    )


def _gpus() -> list[GpuLoad]:
    """Return every GPU of the machine; none when NVIDIA's library or driver is not there or fails.

    Source: NVML's interface, docs.nvidia.com/deploy/nvml-api.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the package, the driver's library, or the driver: each its own error
        return []
    try:
        return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> GpuLoad:
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:  # a MIG slice tells none
        busy = 0
    return GpuLoad(
        name=name.decode() if isinstance(name, bytes) else str(name),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        busy_percent=busy,
    )
