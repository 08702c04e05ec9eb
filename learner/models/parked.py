"""What models keep on a device, moved to the host's memory and back while another process uses the device.

Memory is moved under the tensors: a tensor, its views and whoever holds them stay the same objects, so it does not
matter how DeepSpeed has laid out weights, master weights, moments and gradients, nor in which ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage

# Objects of other modules are not looked into: they hold no model, and some of them the whole process.
_LOOKED_INTO = ("learner.", "deepspeed.", "torch.nn.", "torch.optim.", "transformers.")


class ParkedModels:
    """The models that can be reached from `roots`. Between `park` and `restore` nobody may read a tensor of theirs."""

    def __init__(self, roots: Iterable[object], device: torch.device) -> None:
        self._roots = list(roots)
        self._device = device
        self._parked: list[tuple[UntypedStorage, Tensor]] = []  # and its bytes on the host

    @property
    def num_bytes(self) -> int:
        """Bytes that are parked now."""
        return sum(held.numel() for _, held in self._parked)

    def park(self) -> None:
        """Move everything to the host and give the device's memory back; nothing when it is there already."""
        if self._parked:
            return
        self._synchronize()
        for storage in _storages(self._roots, self._device):
            held = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            held.copy_(_bytes_of(storage))
            self._parked.append((storage, held))
        for storage, _ in self._parked:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move everything back to where it was."""
        while self._parked:
            storage, held = self._parked[-1]
            storage.resize_(held.numel())
            _bytes_of(storage).copy_(held)
            self._parked.pop()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(roots: Iterable[object], device: torch.device) -> Iterator[UntypedStorage]:
    """Yield each memory on the device that a tensor within `roots` lies in, once."""
    seen: set[int] = set()
    for tensor in _tensors(roots):
        if tensor.device.type != device.type or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        # Memory that torch did not allocate, such as a file's, cannot be given back.
        if storage.nbytes() and storage.resizable() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _tensors(roots: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors that can be reached from `roots`, with their gradients and what DeepSpeed hangs on them."""
    seen: dict[int, object] = {}  # kept alive: what is made on the way, as gradients are, would lend its id to another
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
        elif type(found).__module__.startswith(_LOOKED_INTO) and hasattr(found, "__dict__"):
            waiting.extend(vars(found).values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
