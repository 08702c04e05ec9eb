"""The policy as a Hugging Face model folder: safetensors in shards, config and tokenizer files.

No more than one shard of the model is whole at a time.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from protocol.weights.runs import cut_into_runs

_SHARD_BYTES = 4 << 30
_SKIPPED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export_model(
    folder: Path,
    source: Path,
    model: Any,
    gather: Callable[[Sequence[Tensor]], AbstractContextManager[Any]],
    whole_numel: Callable[[Tensor], int],
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write the model into `folder` from rank 0, beside everything but the weights of the model folder `source`.

    gather: makes tensors whole while its context lasts; all ranks enter it together, shard by shard. A tied head is not
    written: its config says that it is the embedding. Raises: OSError when the disk refuses.
    """
    weights = [*model.named_parameters(), *_kept_buffers(model)]
    is_first = dist.get_rank() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_description(source, folder, weights[0][1].dtype)
    shards = cut_into_runs(weights, lambda pair: whole_numel(pair[1]) * pair[1].element_size(), shard_bytes)
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        with gather([tensor for _, tensor in shard]):
            if is_first:
                whole = _as_on_disk(model, {key: tensor.detach().to("cpu") for key, tensor in shard})
                save_file(whole, folder / name, metadata={"format": "pt"})
                index |= dict.fromkeys(whole, name)
                total += sum(tensor.nbytes for tensor in whole.values())
    if is_first and len(shards) > 1:
        body = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=1), encoding="utf-8")
    dist.barrier()


def _kept_buffers(model: Any) -> list[tuple[str, Tensor]]:
    """Return what a model keeps beside its parameters and cannot work out anew, such as the bias of a router."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def _as_on_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names and in the shapes that model folders have: experts one by one, in memory one."""
    from transformers.core_model_loading import revert_weight_conversion

    parts = revert_weight_conversion(model, tensors)
    # safetensors refuses to write tensors that share memory, as the parts of one do.
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in parts.items()}


def _copy_description(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer, template and code; the config then names the type that the weights now have."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_SKIPPED):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
