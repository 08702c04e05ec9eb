"""What a node tells of its machine; the driver of its GPUs is played with NVML's own names."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from deploy.node.machine import machine_load


class NVMLError(Exception): ...


class Nvml(ModuleType):
    """`pynvml` of a machine with two cards; the second does not tell how busy it is."""

    NVMLError = NVMLError

    def __init__(self, has_driver: bool = True) -> None:
        super().__init__("pynvml")
        self.has_driver = has_driver
        self.is_open = False

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return ["NVIDIA H100", b"NVIDIA L4"][handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=[80, 24][handle] << 30, used=[60, 1][handle] << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 1:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=97, memory=40)


@pytest.fixture(params=[True, False])
def nvml(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    played = Nvml(has_driver=request.param)
    monkeypatch.setitem(sys.modules, "pynvml", played)
    yield played
    assert not played.is_open


def test_machine_tells_its_cards_and_none_without_a_driver(nvml: Nvml) -> None:
    load = machine_load()
    assert 0 < load["used_bytes"] < load["total_bytes"]
    assert load["num_cores"] > 0
    cards = [
        (gpu["name"], gpu["used_bytes"] >> 30, gpu["total_bytes"] >> 30, gpu["busy_percent"]) for gpu in load["gpus"]
    ]
    assert cards == ([("NVIDIA H100", 60, 80, 97), ("NVIDIA L4", 1, 24, 0)] if nvml.has_driver else [])


def test_machine_without_the_drivers_package_has_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine_load()["gpus"] == []
