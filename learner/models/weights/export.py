"""The policy as a Hugging Face model folder: safetensors in shards, config and tokenizer files, adapters merged in.

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

from learner.models.read_back import WrittenFiles
from learner.models.weights.pushed import as_on_disk, weights_of
from protocol.node.small_model_files import TEMPLATES
from protocol.weights.digest import digest_of_tensor
from protocol.weights.wire import cut_into_runs

_SHARD_BYTES = 4 << 30
_SKIPPED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export_model(
    folder: Path,
    source: Path,
    model: Any,
    gather: Callable[[Sequence[Tensor]], AbstractContextManager[Any]],
    whole_numel: Callable[[Tensor], int],
    shard_bytes: int = _SHARD_BYTES,
) -> WrittenFiles:
    """Write the model into `folder` from rank 0, with the other files of the model folder `source`. Collective.

    Returns the files on rank 0, and nothing on other ranks. A tied head is not written: its config says that it is the
    embedding.

    gather: makes tensors whole while its context lasts; all ranks enter it together, shard by shard.
    whole_numel: returns the number of a tensor's elements when it is whole.
    Raises: OSError or SafetensorError when the disk refuses.
    """
    weights = weights_of(model)
    is_first = dist.get_rank() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_description(source, folder, weights[0].parts[0].dtype)
    shards = cut_into_runs(
        weights, lambda weight: whole_numel(weight.parts[0]) * weight.parts[0].element_size(), shard_bytes
    )
    written: WrittenFiles = {}
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        with gather([part for weight in shard for part in weight.parts]):
            if is_first:
                whole = _on_disk(model, {weight.name: weight.merge().to("cpu") for weight in shard})
                written[folder / file] = {name: digest_of_tensor(name, tensor) for name, tensor in whole.items()}
                save_file(whole, folder / file, metadata={"format": "pt"})
                index |= dict.fromkeys(whole, file)
                total += sum(tensor.nbytes for tensor in whole.values())
    if is_first and len(shards) > 1:
        body = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(body, indent=1), encoding="utf-8")
    dist.barrier()
    return written


def _on_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = as_on_disk(model, tensors)
    # safetensors refuses to write tensors that share memory, as the parts of one do.
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in parts.items()}


def _copy_description(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer, template and code; the config then names the type that the weights now have."""
    for path in (*source.iterdir(), *(source / TEMPLATES).glob("*.jinja")):
        if path.is_file() and not path.name.endswith(_SKIPPED):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
