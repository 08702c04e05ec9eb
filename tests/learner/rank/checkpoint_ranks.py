"""Two ranks that save checkpoints with faults in them, run by test_checkpoint: `python checkpoint_ranks.py FOLDER`.

Rank 1 has the small files of the model, and no weights.

For each ZeRO stage rank 0 writes to FOLDER/stage_N.pt the error of each fault, and the steps that have a checkpoint.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from learner.checkpoint.folder import newest_valid, seal
from learner.checkpoint.manifest import MANIFEST, Checkpoint
from learner.checkpoint.sealed_files import Report
from learner.models.critic import CriticEngine
from learner.models.micro_batch import make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.reference import ReferenceModel
from learner.models.roles import Roles
from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.training.shards import WEIGHT
from learner.models.world import own_device, reduce_max
from learner.rank.checkpoint import CheckpointWriter, load_checkpoint
from learner.rank.solo_work import SoloWork
from protocol.errors import OperatorError
from protocol.node.small_model_files import read_small_files
from protocol.settings.evaluation import EvalSettings
from tests.learner.models.forked_world import run_world
from tests.learner.models.small_policy import loss, settings, trajectories

STAGES: tuple[Literal[0, 2, 3], ...] = (0, 2, 3)
STATE, EXPORT = "state/policy/state_00000.safetensors", "model/model.safetensors"
Fault = Callable[[Path], None]


class _Disk(SoloWork):
    """Rank 0's own work and the coordinator, with faults in files before and after they are sealed."""

    def __init__(self) -> None:
        super().__init__(dist.distributed_c10d._get_default_store(), dist.get_rank(), 60.0)
        self.before_seal: Fault | None = None
        self.after_seal: Fault | None = None

    def save_ledger(self, path: Path, step: int, report: Report) -> None:
        path.write_bytes(b"ledger")
        if self.before_seal is not None:
            self.before_seal(path.parent)

    def do(self, what: str, work: Callable[[Report], object]) -> None:
        super().do(what, work)
        if what.startswith("seal") and self.after_seal is not None:
            if dist.get_rank() == 0:
                self.after_seal(Path(what.removeprefix("seal ")))
            dist.barrier()


def flip(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)


def change(name: str, tensor: str, folder: Path) -> None:
    """Add to one number of a tensor in a file, which stays well-formed."""
    tensors = load_file(folder / name)
    tensors[tensor].view(-1)[3] += 1e-3
    save_file(tensors, folder / name, metadata={"format": "pt"})


def round_moment(folder: Path) -> None:
    tensors = load_file(folder / STATE)
    name = next(name for name in tensors if name.startswith("exp_avg/"))
    save_file(tensors | {name: tensors[name].bfloat16()}, folder / STATE, metadata={"format": "pt"})


WEIGHT_NAME = "model.norm.weight"
FAULTS: dict[str, tuple[str, Fault]] = {
    "byte of the state": ("after", partial(flip, STATE)),
    "byte of the model": ("after", partial(flip, EXPORT)),
    "tensor of the state": ("before", partial(change, STATE, f"weight/{WEIGHT_NAME}")),
    "moment of the state": ("before", partial(change, STATE, f"exp_avg_sq/{WEIGHT_NAME}")),
    "tensor of the model": ("before", partial(change, EXPORT, WEIGHT_NAME)),
    "type of a moment": ("before", round_moment),
}


class Saving:
    def __init__(self, folder: Path, stage: Literal[0, 2, 3]) -> None:
        self.run = folder / f"run_{stage}"
        self.model = folder / ("model" if dist.get_rank() == 0 else "small_files")
        self.policy = PolicyEngine(settings(self.model, stage))
        self.disk = _Disk()
        self.served = ""
        self.step = 0
        self.writer = CheckpointWriter(
            Roles(self.policy),
            cast(Any, self.disk),
            self.disk,
            self.run,
            folder / "model",
            keep=9,
            evals=EvalSettings(),
            served_digest=lambda: self.served,
        )

    def load_others(self) -> float:
        """Return the largest difference between ranks in what a reference and a critic compute."""
        micro_batch = make_micro_batch(trajectories()[:2])
        of_model = settings(self.model, self.policy._settings.zero_stage)
        reference = ReferenceModel(of_model, is_offloaded=False, is_kept=False)
        critic = CriticEngine(of_model)
        found = torch.cat([reference.logprobs(micro_batch), critic.values(micro_batch)])
        mean = found.clone()
        dist.all_reduce(mean)
        critic._model.bias.fill_(-2.25)
        critic.save_state(self.run / "critic")
        critic._model.bias.zero_()  # as of another critic.model
        critic.load_state(self.run / "critic")
        self.loaded_bias = float(critic._model.bias)
        return reduce_max(float((found - mean / 2).abs().max()), own_device())

    def update(self) -> None:
        samples = trajectories()[:2]
        parts = [make_micro_batch([samples[dist.get_rank()]])]
        assert self.policy.step(parts, loss, sum(int(s.loss_mask.sum()) for s in samples)).applied

    def save(self) -> str:
        """Return the error of a save, or "saved"."""
        self.step += 1
        try:
            self.writer.save(self.step, self.step)
        except OperatorError as error:
            return f"{type(error).__name__}: {error}"
        return "saved"

    def restore(self, weights: dict[str, torch.Tensor]) -> None:
        """Take back what updates did to the weights, as an optimizer does that steps on a copy."""
        shards = self.policy._shards
        for name, parameter in self.policy.weights():
            start, stop = shards.kept_range(parameter)
            shards.set_weight(parameter, lambda name=name: weights[name])  # type: ignore[misc]
            shards.set_kept(parameter, WEIGHT, weights[name].flatten()[start:stop])

    def go(self) -> dict[str, Any]:
        found: dict[str, Any] = {"broadcast": self.policy.pushed_digest(), "other models": self.load_others()}
        found["bias of a critic"] = self.loaded_bias
        self.update()
        found["first"] = self.save()
        self.served = self.policy.pushed_digest()
        self.update()
        found["servers hold older weights"] = self.save()
        self.served = self.policy.pushed_digest()
        for name, (when, fault) in FAULTS.items():
            self.disk.before_seal, self.disk.after_seal = (fault, None) if when == "before" else (None, fault)
            found[name] = self.save()
        self.disk.before_seal = self.disk.after_seal = None
        found["second"] = self.save()
        weights = {}
        for name, parameter in self.policy.weights():
            with self.policy.gather([parameter]):
                weights[name] = parameter.detach().clone()
        self.update()
        self.restore(weights)
        found["weights that did not change"] = self.save()
        return found | self.load()

    def load(self) -> dict[str, Any]:
        """Load the newest checkpoint, then again with a changed weight under a right manifest."""
        newest = newest_valid(self.run / "checkpoints")
        assert newest is not None
        roles = Roles(self.policy)
        found: dict[str, Any] = {"newest": newest.path.name, "loaded": load_checkpoint(roles, newest)}
        found["on two kinds of devices"] = self.load_on_two_kinds_of_devices(roles, newest)
        dist.barrier()
        if dist.get_rank() == 0:
            change(STATE, f"weight/{WEIGHT_NAME}", newest.path)
            (newest.path / MANIFEST).unlink()
            seal(newest.path, newest)
        dist.barrier()
        try:
            load_checkpoint(roles, newest)
        except OperatorError as error:
            found["refused"] = f"{type(error).__name__}: {error}"
        found["latest"] = (self.run / "checkpoints" / "latest").resolve().name
        return found

    def load_on_two_kinds_of_devices(self, roles: Roles, newest: Checkpoint) -> tuple[int, int]:
        """Load a checkpoint where only rank 0 has the device that saved it."""
        own = "float32, merged on another device" if dist.get_rank() else newest.policy_form
        with mock.patch.object(PolicyEngine, "digest_form", own):
            return load_checkpoint(roles, newest)


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # once, not once a rank

    (folder / "small_files").mkdir()
    for name, content in read_small_files(folder / "model", with_code=False).items():
        (folder / "small_files" / name).write_bytes(content)
    for stage in STAGES:
        run_world(2, folder, f"stage_{stage}", lambda folder, stage=stage: Saving(folder, stage).go(), 300)  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1:])
