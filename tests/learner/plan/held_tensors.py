"""How many bytes tensors hold in this process, counted tensor by tensor: what a plan's figure is held against."""

import gc
import warnings

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
