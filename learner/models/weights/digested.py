"""The digest of a whole model under the names that servers know: in memory, and in a model folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from learner.models.weights.pushed import PushedWeights
from protocol.weights.digest import digest_of_all, digest_of_tensor

_BUCKET_BYTES = 64 << 20


def digest_of_model(model: Any, dtype: str | None) -> str:
    """Return the digest of a model that is whole in this process, as a push of it has it. dtype: as `PushedWeights`."""
    return digest_of_all({name: digest_of_tensor(name, tensor) for name, tensor in pushed_tensors(model, dtype)})


def pushed_tensors(model: Any, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of what a push of a whole model has, adapters merged in. dtype: as `PushedWeights`."""
    weights = PushedWeights(
        model, lambda parts: parts, lambda part: tuple(part.shape), dtype=dtype, bucket_bytes=_BUCKET_BYTES
    )
    for bucket in weights.buckets(is_sender=True):
        for name, tensor in bucket:
            yield name, tensor.detach().contiguous()


def digest_of_folder(folder: Path) -> str:
    """Return the digest of the weights in a model folder, in the types that they have there, one at a time.

    Raises: OSError or SafetensorError when it cannot be read.
    """
    return digest_of_all({name: digest_of_tensor(name, tensor) for name, tensor in folder_tensors(folder)})


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the weights in a model folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):  # it is no mapping
                yield name, file.get_tensor(name)
