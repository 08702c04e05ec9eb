"""Saving and loading of a run's state by all ranks together, inside `learner.checkpoint.folder`'s folder and manifest:

    state/ROLE/   master weights, optimizer, schedule, for any number of ranks; a reference's model folder
    state/memory.json   what the objective knows of earlier steps
    model/        the policy as a Hugging Face folder
    random/       each rank's random generators
    told.json     what the ranks held, for the proof
    ledger.sqlite, wandb_run_id

The place in the prompt order is in the ledger.
"""

import shutil
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from learner.checkpoint.best import BestBy, keep_best
from learner.checkpoint.folder import aside_folder, begin, commit, rotate
from learner.checkpoint.manifest import Checkpoint
from learner.checkpoint.sealed_files import Tell, quiet
from learner.checkpoint.told import Told, write_told
from learner.disk.layout import CHECKPOINTS, LEDGER, WANDB_ID
from learner.disk.model_folder import model_digest
from learner.models.roles import Roles
from learner.rank.coordinator_client import CoordinatorClient
from learner.rank.proof.proving import Proving
from learner.rank.random_state import load_random_state, save_random_state
from learner.rank.solo_work import SoloWork
from protocol.errors import OperatorError
from protocol.failpoints import failpoint


class CheckpointWriter:
    """Writes the checkpoints of a run; one on every rank, and all ranks call `save` at the same step."""

    def __init__(
        self,
        roles: Roles,
        coordinator: CoordinatorClient,
        solo: SoloWork,
        folder: Path,
        model: Path,
        keep: int,
        best_by: BestBy | None = None,
        proving: Proving | None = None,
    ) -> None:
        """folder: the run's, on a disk that all ranks share. keep: how many valid checkpoints stay.

        best_by: how the one is chosen that stays besides; None: none does. proving: of what is saved; None: `latest`
        names each checkpoint at once.
        """
        self._roles = roles
        self._coordinator = coordinator
        self._solo = solo
        self._folder = folder
        self._model = model
        self._keep = keep
        self._best_by = best_by
        self._proving = proving
        self._proofs = proving.proofs if proving is not None else None
        self._verified: set[Path] = set()

    def save(self, step: int, policy_version: int) -> None:
        """Write checkpoints/step_N.

        Raises: OperatorError when it cannot be written, NonFiniteWeightsError on every rank when the weights or the
        optimizer's state are not finite; the earlier checkpoints are intact then. NeighbourError when rank 0, which
        does the last part alone, is gone or stuck.
        """
        self._roles.check_finite()
        told = None if self._proving is None else self._proving.tell(step, policy_version)
        root = self._folder / CHECKPOINTS
        aside = aside_folder(root, step)
        with self._proofs.lock if self._proofs is not None else nullcontext():
            self._solo.do(f"make {aside}", lambda tell: begin(root, step))
            self._write(aside)
            dist.barrier()
            self._solo.do(f"seal {aside}", lambda tell: self._seal(aside, step, policy_version, told, tell))

    def finish(self) -> str:
        """Wait for the last proof, all ranks together; returns what is to be said of it, empty when it is well."""
        if self._proving is None:
            return ""
        proofs = self._proofs
        self._solo.do("wait for the last proof", lambda tell: None if proofs is None else proofs.finish(tell))
        return proofs.problem if proofs is not None else ""

    def _write(self, aside: Path) -> None:
        try:
            self._roles.save_state(aside / "state")
            save_random_state(_random_path(aside))
            failpoint("rank_checkpoint.after_state")
            self._roles.policy.export_hf(aside / "model")
            failpoint("rank_checkpoint.after_model")
            if dist.get_rank() == 0 and (self._folder / WANDB_ID).exists():
                shutil.copyfile(self._folder / WANDB_ID, aside / WANDB_ID)
        except (OSError, RuntimeError) as error:
            raise OperatorError(
                f"The checkpoint {aside} cannot be written: {error}. The earlier checkpoints are intact. "
                "Make room, then run the same command again to go on from the newest."
            ) from None

    def _seal(self, aside: Path, step: int, policy_version: int, told: Told | None, tell: Tell) -> None:
        """Add the ledger, hash and verify everything, and remove what is older than the newest `keep`."""
        if told is not None:
            write_told(aside, told)
        self._coordinator.save_ledger(aside / LEDGER, step, tell)
        failpoint("rank_checkpoint.after_ledger")
        checkpoint = Checkpoint(aside, step, policy_version, self._folder.name, model_digest(self._model))
        committed = commit(aside, checkpoint, tell, is_proven_later=told is not None).path
        self._verified.add(committed)
        protected = keep_best(aside.parent, self._folder, self._best_by) if self._best_by is not None else set()
        if self._proofs is not None and told is not None:
            self._proofs.add(committed, told)
            protected |= self._proofs.needed_steps()
        self._verified.difference_update(rotate(aside.parent, self._keep, self._verified, protected))
        failpoint("rank_checkpoint.before_barrier")


def load_checkpoint(roles: Roles, checkpoint: Checkpoint, tell: Tell = quiet) -> tuple[int, int]:
    """Return (step, policy version) of a verified checkpoint, now loaded into the models.

    tell: hears what the checkpoint has not.
    """
    roles.load_state(checkpoint.path / "state", tell)
    load_random_state(_random_path(checkpoint.path))
    failpoint("rank_checkpoint.state_loaded")
    return checkpoint.step, checkpoint.policy_version


def _random_path(folder: Path) -> Path:
    return folder / "random" / f"rank_{dist.get_rank():05d}.json"
