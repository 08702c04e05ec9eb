"""The digest of a whole model under the names that servers know: in memory, and in a model folder."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from learner.models.weights.pushed import PushedWeights
from protocol.weights.digest import digest_of_all, digest_of_tensor


def digest_of_model(model: Any, dtype: str | None) -> str:
    """Return the digest that servers hold after a push of a whole model. dtype: as in `PushedWeights`."""
    pushed = PushedWeights(model, nullcontext, lambda part: tuple(part.shape), dtype=dtype, bucket_bytes=1 << 26)
    tensors = pushed.tensors(is_sender=True)
    return digest_of_all({name: digest_of_tensor(name, tensor.detach().contiguous()) for name, tensor in tensors})


def digest_of_folder(folder: Path) -> str:
    """Return the digest of the weights in a model folder, in their own types."""
    tensors = (pair for path in sorted(folder.glob("*.safetensors")) for pair in load_file(path).items())
    return digest_of_all({name: digest_of_tensor(name, tensor) for name, tensor in tensors})
