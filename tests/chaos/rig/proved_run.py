"""A run of real DeepSpeed models on one rank whose checkpoints tell what the rank held: policy, critic, reference."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.checkpoint.proof import Proof
from learner.checkpoint.sealed_files import Tell
from learner.checkpoint.told import Told
from learner.disk.layout import CHECKPOINTS, LEDGER
from learner.ledger.ledger import Ledger
from learner.models.critic import CriticEngine
from learner.models.micro_batch import LearnerSample, MicroBatch, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.reference import ReferenceModel
from learner.models.roles import Roles
from learner.models.settings import critic_settings, policy_settings, reference_settings
from learner.models.step_result import Sums
from learner.models.training.trained_model import TrainedModel
from learner.models.world import free_address, join_world
from learner.rank.checkpoint import CheckpointWriter
from learner.rank.proof.proofs import Proofs
from learner.rank.proof.proving import Proving
from learner.rank.proof.witness import Witness
from learner.rank.solo_work import SoloWork
from protocol.settings.settings import Settings
from tests.fakes.tiny_models import make_tiny_model

STEPS = (1, 2, 3, 4)
_SHARD_BYTES = 60_000  # so that a state of this size has several files
_GROUPS_PER_STEP = 2


@dataclass
class ProvedRun:
    """A run's folder with a checkpoint of every step, none of them proven yet."""

    folder: Path
    model: Path  # that the policy was first loaded from
    settings: Settings
    told: dict[int, Told] = field(default_factory=dict)  # by step: what the rank held

    def checkpoint(self, step: int) -> Path:
        return self.folder / CHECKPOINTS / f"step_{step:06d}"


def make_proved_run(folder: Path, seed: int) -> ProvedRun:
    """Train tiny models for the steps of STEPS, and save each. This process becomes a world of one rank."""
    torch.set_num_threads(1)
    store = join_world(0, 1, *free_address("127.0.0.1"), 120.0)
    model = make_tiny_model(folder / "model", tied=True, hidden_size=32, seed=seed)
    settings = Settings.model_validate(
        {
            "run": {"name": "run", "dir": str(folder), "seed": seed},
            "policy": {"model": str(model)},
            "learner": {"lr": 1e-3, "keep_checkpoints": len(STEPS), "prove_checkpoints": True},
            "critic": {"lr": 1e-3},
        }
    )
    run = ProvedRun(folder / "run", model, settings)
    (run.folder / CHECKPOINTS).mkdir(parents=True)
    roles = Roles(
        _SmallPolicy(policy_settings(settings, model)),
        _SmallCritic(critic_settings(settings, model)),
        ReferenceModel(reference_settings(settings, model), is_offloaded=False, is_kept=True),
    )
    writer = _writer(run, roles, SoloWork(store, 0, 60.0))
    for step in STEPS:
        _train(roles, step, seed)
        writer.save(step, step)
        writer.finish()
    return run


def _writer(run: ProvedRun, roles: Roles, solo: SoloWork) -> CheckpointWriter:
    def keep(path: Path, told: Told, *_: object) -> Proof | None:
        run.told[told.step] = told
        return None

    witness = Witness(roles, run.folder.name, run.settings, None)
    proving = Proving(witness, roles.policy.pushed_digest, Proofs(run.folder / CHECKPOINTS, keep))
    client: Any = _Books(run.folder / LEDGER)
    return CheckpointWriter(roles, client, solo, run.folder, run.model, len(STEPS), proving=proving)


class _Books:
    """The coordinator's part: a ledger that accounts for every step."""

    def __init__(self, path: Path) -> None:
        self._ledger = Ledger(path)

    def save_ledger(self, path: Path, step: int, tell: Tell) -> None:
        groups = [f"g{step}-{number}" for number in range(_GROUPS_PER_STEP)]
        for number, group in enumerate(groups):
            self._ledger.lease(group, 0, f"u{group}", step * _GROUPS_PER_STEP + number, "server", 1)
        self._ledger.mark_trained(groups, step, step - 1)
        self._ledger.snapshot(path)


class _SmallPolicy(PolicyEngine):
    def save_state(self, folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
        TrainedModel.save_state(self, folder, shard_bytes)


class _SmallCritic(CriticEngine):
    def save_state(self, folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
        TrainedModel.save_state(self, folder, shard_bytes)


def _train(roles: Roles, step: int, seed: int) -> None:
    """Take a step with every model, and with what is remembered beside them."""
    draw = np.random.default_rng([seed, step])
    samples = [_sample(draw) for _ in range(4)]
    part, count = make_micro_batch(samples), sum(int(sample.loss_mask.sum()) for sample in samples)
    assert roles.critic is not None
    assert isinstance(roles.reference, ReferenceModel)
    assert roles.policy.step([part], _policy_loss, count).applied
    assert roles.critic.step([part], _value_loss, count).applied
    if step % 2 == 0:
        roles.reference.refresh(roles.policy)
    roles.memory["kl_coefficient"] = 0.1 * step


def _sample(draw: np.random.Generator) -> LearnerSample:
    tokens = draw.integers(0, 272, 12).astype(np.int32)
    is_written = np.arange(12) > 3
    return LearnerSample(tokens, is_written, np.where(is_written, -5.0, 0.0).astype(np.float32), float(draw.normal()))


def _policy_loss(logprobs: Tensor, entropies: Tensor, part: MicroBatch) -> tuple[Tensor, Sums]:
    return -(logprobs * part.advantages).sum(), {}


def _value_loss(values: Tensor, part: MicroBatch) -> tuple[Tensor, Sums]:
    return ((values - part.advantages) ** 2).sum(), {}
