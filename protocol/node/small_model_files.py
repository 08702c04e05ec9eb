"""The small files of a model folder (configuration, tokenizer, chat template, code), sent to nodes without the model.

Only the node of learner rank 0 needs the weights. Other processes build the model from the small files and receive the
weights by a push or a broadcast.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from protocol.disk.files import replacing
from protocol.errors import NeighbourError, OperatorError
from protocol.node.home import sluice_home

SmallFiles = Mapping[str, bytes]
"""File name -> content."""

MAX_BYTES = 128 << 20  # the largest tokenizers have 40 MB
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe"}
GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"  # folder of transformers, with one file per named template
_CODE_SUFFIX = ".py"


def read_small_files(folder: Path, *, with_code: bool) -> dict[str, bytes]:
    """Return the model folder's files except its weights and their index.

    with_code: whether Python files are included (policy.trust_remote_code).
    Raises: OperatorError when they have more than MAX_BYTES in all.
    """
    files: dict[str, bytes] = {}
    num_bytes = 0
    for path in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]):
        if not _is_small(path, with_code):
            continue
        num_bytes += path.stat().st_size
        if num_bytes > MAX_BYTES:
            raise OperatorError(
                f"The model folder {folder} has more than {MAX_BYTES >> 20} MiB of files other than weights, up to "
                f"{path.name}. These are sent to every node. Remove the files that the model does not need."
            )
        files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def small_files_digest(files: SmallFiles) -> str:
    """Return a hash of the files: of the model's shape, tokenizer and code, whatever its weights."""
    digest = sha256()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + sha256(content).digest())
    return digest.hexdigest()


def end_tokens(files: SmallFiles) -> set[int]:
    """Return the end tokens that a model folder's files name for generation, of config.json also those of its text."""
    with suppress(ValueError, AttributeError):
        names = json.loads(files.get(GENERATION, files.get("config.json", b"")))
        given = names.get("eos_token_id")
        given = names.get("text_config", {}).get("eos_token_id") if given is None else given
        return {given} if isinstance(given, int) else set(given or ())
    return set()


def read_end_tokens(folder: Path) -> set[int]:
    """Return the end tokens that a model folder names for generation."""
    files = [folder / name for name in (GENERATION, "config.json")]
    return end_tokens({file.name: file.read_bytes() for file in files if file.is_file()})


def find_small_files(digest: str) -> Path:
    """Return the folder that `write_small_files` wrote on this node. Raises: NeighbourError if it is missing."""
    folder = _folder_of(digest)
    if not folder.is_dir():
        raise NeighbourError("model", f"{folder} is missing on this node: the model's configuration was not sent")
    return folder


def write_small_files(files: SmallFiles) -> Path:
    """Return this node's folder with these files, written once under SLUICE_HOME/cache/models.

    Raises: OperatorError when the folder cannot be written.
    """
    folder = _folder_of(small_files_digest(files))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in files.items():
            path = folder / _checked_name(name)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            # The content is compared: a file may be empty after a loss of power.
            if not path.is_file() or path.read_bytes() != content:
                with replacing(path, writer=str(os.getpid())) as aside:
                    aside.write_bytes(content)
    except OSError as error:
        raise OperatorError(
            f"The model's configuration cannot be written to {folder}: {error.strerror}. Set SLUICE_HOME to a writable "
            "folder on a disk with free space."
        ) from None
    return folder


def _folder_of(digest: str) -> Path:
    return sluice_home() / "cache" / "models" / digest[:16]


def _is_small(path: Path, with_code: bool) -> bool:
    if path.name.startswith(".") or path.name.endswith(".index.json") or not path.is_file():
        return False
    return path.suffix in _SUFFIXES or (with_code and path.suffix == _CODE_SUFFIX)


def _checked_name(name: str) -> str:
    if name.removeprefix(f"{TEMPLATES}/") != Path(name).name:
        raise ValueError(f"small model files: {name!r} is not a plain file name")
    return name
