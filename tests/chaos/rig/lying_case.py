"""A checkpoint that is made to lie, and what is done to its files to that end."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from learner.checkpoint.manifest import MANIFEST, Checkpoint, manifest_bytes
from learner.checkpoint.sealed_files import seal_files
from learner.checkpoint.told import TOLD, Told, ToldModel, write_told


@dataclass
class Case:
    """One checkpoint that is made to lie."""

    folder: Path  # the copy
    before: Path  # the checkpoint of the step before
    told: Told  # what the ranks held; a lie of the ranks' own changes it
    facts: Checkpoint  # what the manifest says
    draw: Random

    def role(self) -> str:
        return self.draw.choice(("policy", "critic"))


def reseal(case: Case) -> None:
    """Give the folder a manifest by which every file is as it should be."""
    (case.folder / MANIFEST).unlink(missing_ok=True)
    (case.folder / MANIFEST).write_bytes(manifest_bytes(case.facts, seal_files(case.folder)))


def take(case: Case, name: str) -> None:
    """Have a file or folder of the checkpoint be that of the one before."""
    target = case.folder / name
    if target.is_dir():
        shutil.rmtree(target)
        shutil.copytree(case.before / name, target)
    else:
        shutil.copyfile(case.before / name, target)


def tensors_in(file: Path) -> dict[str, Tensor]:
    """Return a file's tensors, in memory of their own: the file is about to be written over."""
    return load(file.read_bytes())


def shards(case: Case, role: str) -> list[Path]:
    return sorted((case.folder / "state" / role).glob("*.safetensors"))


def draw_shard(case: Case, role: str) -> Path:
    return case.draw.choice(shards(case, role))


def files_of(case: Case, role: str) -> dict[str, Path]:
    """Return the file of every tensor of a state."""
    return {name: file for file in shards(case, role) for name in tensors_in(file)}


def describe(case: Case, role: str, num_updates: int) -> None:
    file = case.folder / "state" / role / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "num_updates": num_updates}))


def mix_in(file: Path, before: Path, is_taken: Callable[[str], bool]) -> None:
    """Have those tensors of a file be the file's of the checkpoint before."""
    old = tensors_in(before)
    save_file({name: old[name] if is_taken(name) else tensor for name, tensor in tensors_in(file).items()}, file)


def stale_tensor(case: Case, key: str) -> None:
    tensors = files_of(case, case.role())
    name = case.draw.choice([name for name in sorted(tensors) if name.startswith(key)])
    file = tensors[name]
    mix_in(file, case.before / file.relative_to(case.folder), lambda other: other == name)


def set_tensor(file: Path, name: str, tensor: Tensor) -> None:
    save_file({**tensors_in(file), name: tensor}, file)


def change_one(case: Case, tensors: dict[str, Path], name: str) -> None:
    """Change one number of a tensor by the least that its type knows."""
    tensor = tensors_in(tensors[name])[name]
    flat = tensor.flatten()
    place = case.draw.randrange(len(flat))
    flat[place] = torch.nextafter(flat[place], torch.tensor(float("inf"), dtype=tensor.dtype))
    set_tensor(tensors[name], name, flat.view(tensor.shape))


def is_square(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def told_before(case: Case) -> Told:
    return msgspec.json.decode((case.before / TOLD).read_bytes(), type=Told)


def retell(case: Case, role: str, told: ToldModel) -> None:
    case.told = msgspec.structs.replace(case.told, models={**case.told.models, role: told})
    write_told(case.folder, case.told)
