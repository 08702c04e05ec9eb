"""Comparison of files that were written with the memory that they were written from, tensor by tensor."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import OperatorError
from protocol.weights.digest import digest_of_tensor

WrittenFiles = dict[Path, dict[str, str]]
"""Safetensors files that this rank wrote: file -> tensor -> digest of the tensor in memory."""


class CheckpointMismatchError(OperatorError):
    """A checkpoint that is being saved differs from memory. It gets no name, and `latest` stays where it is."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"{self.problem}. The earlier checkpoints are intact. Check the disk and the memory of this node, then run "
            "the same command again to resume from the newest."
        )


def find_mismatch(written: Mapping[Path, Mapping[str, str]], device: torch.device) -> str | None:
    """Return the first tensor that differs between a file and memory, or None.

    Reads every file once, one tensor at a time. device: computes the digests.
    """
    for path, expected in written.items():
        try:
            problem = _find_in_file(path, expected, device)
        except (SafetensorError, OSError) as error:
            problem = f"{path} cannot be read: {error}"
        if problem is not None:
            return problem
    return None


def _find_in_file(path: Path, expected: Mapping[str, str], device: torch.device) -> str | None:
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != expected.keys():
            return f"{path} holds other tensors than memory, such as {min(names ^ expected.keys())}"
        for name in sorted(names):
            found = digest_of_tensor(name, file.get_tensor(name).to(device))
            if found != expected[name]:
                return f"{path}: the tensor {name} has the digest {found} in the file and {expected[name]} in memory"
    return None
