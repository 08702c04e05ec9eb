"""Moving models from a device to host memory and back, while another process uses the device.

The memory under the tensors moves. Tensors and views stay the same objects, so every ZeRO stage and
every layout of weights, master weights, moments and gradients works.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

# Objects of these packages are searched, and every module of torch. Others hold no model, some the whole process.
_SEARCHED = ("learner.", "deepspeed.", "torch.nn.", "torch.optim.", "transformers.", "peft.")


class ParkedModels:
    """The models that can be reached from `roots`. Do not read their tensors between `park` and `restore`."""

    def __init__(self, roots: Iterable[object], device: torch.device) -> None:
        self._roots = list(roots)
        self._device = device
        self._parked: list[tuple[UntypedStorage, Tensor]] = []  # with its bytes on the host
        self._memory = torch.empty(0, dtype=torch.uint8)  # on the host, kept for the next turn

    @property
    def num_bytes(self) -> int:
        """Bytes that are parked now."""
        return sum(held.numel() for _, held in self._parked)

    def park(self) -> None:
        """Move everything to the host and free the device's memory; does nothing the second time."""
        if self._parked:
            return
        self._synchronize()
        storages = list(_storages(self._roots, self._device))
        sizes = [storage.nbytes() for storage in storages]
        for storage, held in zip(storages, torch.split(self._take_memory(sum(sizes)), sizes), strict=True):
            held.copy_(_bytes_of(storage))
            self._parked.append((storage, held))
        for storage, _ in self._parked:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move everything back."""
        while self._parked:
            storage, held = self._parked[-1]
            storage.resize_(held.numel())
            _bytes_of(storage).copy_(held)
            self._parked.pop()
        self._synchronize()

    def _take_memory(self, num_bytes: int) -> Tensor:
        """Return host memory of this size. Torch's own pinned memory takes the next power of two, for each tensor."""
        if len(self._memory) < num_bytes:
            is_pinned = self._device.type == "cuda"
            cuda: Any = torch.cuda.cudart() if is_pinned else None  # type: ignore[no-untyped-call]
            if is_pinned and len(self._memory):
                cuda.cudaHostUnregister(self._memory.data_ptr())
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before more is taken
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            if is_pinned:
                torch.cuda.check_error(cuda.cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))
        return self._memory[:num_bytes]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(roots: Iterable[object], device: torch.device) -> Iterator[UntypedStorage]:
    """Yield the storage of each tensor within `roots` that is on the device, once."""
    seen: set[int] = set()
    for tensor in _tensors(roots):
        if tensor.device.type != device.type or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        # Memory that torch did not allocate, such as a mapped file, cannot be freed.
        if storage.nbytes() and storage.resizable() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _tensors(roots: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors that can be reached from `roots`, with their gradients and attributes of DeepSpeed."""
    seen: dict[int, object] = {}  # kept alive, since the id of a freed temporary would be used again
    waiting: list[Any] = list(roots)
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, str | bytes | int | float | None):
            continue
        seen[id(found)] = found
        if isinstance(found, Tensor):
            yield found
            if found.is_leaf and found.grad is not None:
                waiting.append(found.grad)
            waiting.extend(vars(found).values())
        elif isinstance(found, Mapping):
            waiting.extend(found.keys())
            waiting.extend(found.values())
        elif isinstance(found, list | tuple | set | frozenset):
            waiting.extend(found)
        elif isinstance(found, torch.nn.Module) or (
            type(found).__module__.startswith(_SEARCHED) and hasattr(found, "__dict__")
        ):
            waiting.extend(vars(found).values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
