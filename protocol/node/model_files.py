"""What a model's folder holds, told in a few hundred bytes: so that another node can say whether it has the same."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict

DESCRIPTION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}
# Beside safetensors files nobody here reads weights of another form; without these, .bin is read.
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}
_FOR_PEOPLE = {".md", ".png", ".jpg", ".pdf"}
_SAMPLE_BYTES = 1 << 12
_NUM_SAMPLES = 64  # of a file that does not tell where its tensors are


class ModelFiles(BaseModel):
    """A model folder on the node that has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    node_id: str  # Ray's id of that node
    path: str  # of the folder there
    files: dict[str, int]  # name -> bytes, of the files that a reader of the model opens
    shape: str  # digest of what describes the model, and of its weights' names and sizes
    weights: str  # digest of a sample of the weights

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def is_at(self, folder: Path, with_weights: bool) -> bool:
        """Return whether a folder of this node holds this model.

        with_weights: False for whoever is pushed other weights, to whom those in the folder do not matter.
        """
        try:
            files = dict(_files(folder))
            is_alike = files == self.files and _shape(folder, files) == self.shape
            return is_alike and (not with_weights or _sample(folder, files) == self.weights)
        except OSError:
            return False


def describe_model(folder: Path, node_id: str) -> ModelFiles:
    """Return what a model folder of this node holds; reads a few kB of each tensor.

    node_id: Ray's id of this node.
    """
    files = dict(_files(folder))
    return ModelFiles(
        node_id=node_id,
        path=str(folder),
        files=files,
        shape=_shape(folder, files),
        weights=_sample(folder, files),
    )


def description_digest(folder: Path) -> str:
    """Return a hash of a model's shape and tokenizer, whatever its weights."""
    digest = sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in DESCRIPTION_SUFFIXES and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + b"\0" + sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of the files that a reader of the model opens."""
    found = sorted(path for path in folder.iterdir() if path.is_file())
    is_safe = any(path.suffix == ".safetensors" for path in found)
    unread = _FOR_PEOPLE | (_OTHER_WEIGHTS if is_safe else _OTHER_WEIGHTS - {".bin"})
    for path in found:
        if path.suffix not in unread and not path.name.startswith("."):
            yield path.name, path.stat().st_size


def _shape(folder: Path, files: dict[str, int]) -> str:
    digest = sha256()
    for name, size in files.items():
        digest.update(f"{name}\0{size}\0".encode())
        suffix = Path(name).suffix
        with (folder / name).open("rb") as file:
            if suffix in DESCRIPTION_SUFFIXES:
                digest.update(file.read())
            elif suffix == ".safetensors":  # it begins with the length of a table of its tensors, then that table
                digest.update(file.read(min(int.from_bytes(file.read(8), "little"), size)))
    return digest.hexdigest()[:16]


def _sample(folder: Path, files: dict[str, int]) -> str:
    """Return a hash of a piece of each tensor: one that was trained differently differs everywhere, and may be a bias.

    Of a file without a table of its tensors, pieces spread over it.
    """
    digest = sha256()
    for name, size in files.items():
        if Path(name).suffix in DESCRIPTION_SUFFIXES:
            continue
        with (folder / name).open("rb") as file:
            for start in _starts(file, name, size):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _starts(file: BinaryIO, name: str, size: int) -> list[int]:
    """Return where a file's pieces begin: in the middle of each tensor, whose first rows may be of unused tokens."""
    spread = [max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)]
    if not name.endswith(".safetensors"):
        return spread
    table_bytes = int.from_bytes(file.read(8), "little")
    try:
        table = json.loads(file.read(min(table_bytes, size)))
        places = [tensor["data_offsets"] for key, tensor in table.items() if key != "__metadata__"]
        return [
            *spread,
            *sorted(8 + table_bytes + max(begin, (begin + end - _SAMPLE_BYTES) // 2) for begin, end in places),
        ]
    except (ValueError, TypeError, KeyError, AttributeError):  # whoever loads it says what is wrong with it
        return spread
