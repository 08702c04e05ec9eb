"""The present load of this machine and its NVIDIA GPUs."""

import importlib
import os
from typing import Any, TypedDict

import psutil


class GpuLoad(TypedDict):
    """One GPU, by its driver (NVML)."""

    name: str  # name of the card
    used_bytes: int  # memory used by all processes
    total_bytes: int  # size of its memory
    busy_percent: int  # share of the last second in which a kernel ran


class MachineLoad(TypedDict):
    """One node's machine."""

    num_cores: int  # cores that programs may use
    load: float  # mean number of runnable processes over a minute
    used_bytes: int  # host memory that is not available
    total_bytes: int  # size of host memory
    gpus: list[GpuLoad]  # empty without a driver


def machine_load() -> MachineLoad:
    """Return the load of this machine. In a container, memory and load are the host's."""
    memory = psutil.virtual_memory()
    return MachineLoad(
        num_cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        used_bytes=memory.total - memory.available,
        total_bytes=memory.total,
        gpus=_gpus(),
    )


def _gpus() -> list[GpuLoad]:
    """Return every GPU of the machine; [] when NVIDIA's library or driver is missing or fails.

    Source: NVML's interface, docs.nvidia.com/deploy/nvml-api.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # package, library and driver have different errors
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
    except nvml.NVMLError:  # a MIG slice reports none
        busy = 0
    return GpuLoad(
        name=name.decode() if isinstance(name, bytes) else str(name),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        busy_percent=busy,
    )
