"""How many bytes tensors hold in this process, counted tensor by tensor: what a plan's figure is held against."""

import gc
import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def held_tensors() -> dict[int, int]:
    """Return the bytes of each tensor's memory by its address; tensors that share it count once."""
    found = {}
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what torch.distributed keeps for old code
        for each in gc.get_objects():
            if isinstance(each, Tensor) and each.layout is torch.strided and not each.is_meta:
                # Python knows of a gradient only once it was asked for.
                for tensor in (each, each.grad if each.is_leaf else None):
                    if tensor is not None:
                        storage = tensor.untyped_storage()
                        found[storage.data_ptr()] = storage.nbytes()
    return found


def bytes_beside(before: dict[int, int], after: dict[int, int]) -> int:
    """Return the bytes of what is in the second count and not in the first."""
    return sum(size for address, size in after.items() if address not in before)


def kept_by(forward: Callable[[], Tensor]) -> int:
    """Return the bytes that a forward pass leaves behind for its backward pass."""
    before, kept, alive = held_tensors(), {}, []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # its address stays its own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    found = bytes_beside(before, {**held_tensors(), **kept})
    del result
    return found
