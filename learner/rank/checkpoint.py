"""Saving and loading of a run's state by all ranks together, in a folder of `learner.checkpoint.folder`:

    state/ROLE/   master weights, optimizer, schedule, for any number of ranks; a reference's model folder
    state/memory.json   the objective's facts of earlier steps
    model/        the policy as a Hugging Face folder
    ledger.sqlite, wandb_run_id

The place in the prompt order is in the ledger.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from learner.checkpoint.best import keep_best
from learner.checkpoint.folder import aside_folder, begin, publish, rotate, seal
from learner.checkpoint.manifest import Checkpoint, RefusedCheckpointError
from learner.checkpoint.sealed_files import Report, no_report
from learner.disk.model_folder import model_digest
from learner.disk.run_folder import CHECKPOINTS, LEDGER, WANDB_ID
from learner.models.policy import PolicyEngine
from learner.models.read_back import CheckpointMismatchError, WrittenFiles, find_mismatch
from learner.models.roles import Roles
from learner.models.world import first_problem, own_device
from learner.rank.coordinator_client import CoordinatorClient
from learner.rank.solo_work import SoloWork
from protocol.errors import OperatorError
from protocol.failpoints import failpoint
from protocol.node.small_model_files import read_small_files, small_files_digest
from protocol.settings.evaluation import EvalSettings
from protocol.weights.digest import digest_of_all


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
        evals: EvalSettings,
        served_digest: Callable[[], str] = lambda: "",
    ) -> None:
        """folder: the run's, on a disk that all ranks share. keep: number of valid checkpoints to keep.

        evals: choose one more checkpoint to keep, the best.
        served_digest: returns on rank 0 the digest of the weights that the rollout servers verified last, or "".
        """
        self._roles = roles
        self._coordinator = coordinator
        self._solo = solo
        self._folder = folder
        self._model = model
        self._keep = keep
        self._evals = evals
        self._served_digest = served_digest
        self._verified: set[Path] = set()
        self._model_files = _files_digest(model)

    def save(self, step: int, policy_version: int) -> None:
        """Write checkpoints/step_N and compare it with memory; then `latest` names it. Collective.

        Raises: OperatorError when it cannot be written, CheckpointMismatchError when it differs from memory or from the
        rollout servers' weights, NonFiniteWeightsError when the weights or the optimizer's state are not finite; the
        earlier checkpoints are intact then. NeighbourError when rank 0 is gone or stuck in its own part.
        """
        self._roles.check_finite()
        aside = aside_folder(self._folder / CHECKPOINTS, step)
        self._solo.do(f"make {aside}", lambda _: self._begin(aside, step))
        written = self._write(aside)
        dist.barrier()
        digest = _digest_of(aside / "model", written)
        self._solo.do(f"seal {aside}", lambda report: self._seal(aside, step, policy_version, digest, report))
        problem = find_mismatch(written, own_device()) or self._find_other_weights(aside, policy_version, digest)
        if (problem := first_problem(problem)) is not None:
            raise CheckpointMismatchError(problem)
        failpoint("rank_checkpoint.read_back")
        self._solo.do(f"publish {aside}", lambda report: self._publish(aside, step, report))

    def _begin(self, aside: Path, step: int) -> None:
        if _files_digest(self._model) != self._model_files:
            raise OperatorError(
                f"Files in {self._model} were changed while the run uses them. Put them back as they are in the model "
                "folder of an earlier checkpoint, then run the same command again."
            )
        begin(aside.parent, step)

    def _write(self, aside: Path) -> WrittenFiles:
        """Return this rank's files with tensors. Raises: OperatorError when the disk refuses."""
        try:
            written = self._roles.save_state(aside / "state")
            failpoint("rank_checkpoint.after_state")
            written |= self._roles.policy.export_hf(aside / "model")
            failpoint("rank_checkpoint.after_model")
            if dist.get_rank() == 0 and (self._folder / WANDB_ID).exists():
                shutil.copyfile(self._folder / WANDB_ID, aside / WANDB_ID)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise OperatorError(
                f"The checkpoint {aside} cannot be written: {error}. The earlier checkpoints are intact. "
                "Make room, then run the same command again to resume from the newest."
            ) from None
        return written

    def _seal(self, aside: Path, step: int, policy_version: int, digest: str, report: Report) -> None:
        """Add the ledger and write the manifest. digest: of the policy as exported."""
        self._coordinator.save_ledger(aside / LEDGER, step, report)
        failpoint("rank_checkpoint.after_ledger")
        form = self._roles.policy.digest_form
        facts = (step, policy_version, self._folder.name, model_digest(self._model), digest, form)
        seal(aside, Checkpoint(aside, *facts), report)

    def _find_other_weights(self, aside: Path, policy_version: int, digest: str) -> str | None:
        """Return on rank 0 how the exported policy differs from the rollout servers' weights, or None."""
        served = self._served_digest()
        if dist.get_rank() != 0 or served in ("", digest):
            return None
        return (
            f"{aside / 'model'}: the policy has the digest {digest}, and the rollout servers verified {served} for "
            f"version {policy_version}"
        )

    def _publish(self, aside: Path, step: int, report: Report) -> None:
        """Give the checkpoint its name, and remove all that is older than the newest `keep`."""
        self._verified.add(publish(aside, step, report).path)
        protected = keep_best(aside.parent, self._folder, self._evals)
        self._verified.difference_update(rotate(aside.parent, self._keep, self._verified, protected))
        failpoint("rank_checkpoint.before_barrier")


def load_checkpoint(roles: Roles, checkpoint: Checkpoint, note: Report = no_report) -> tuple[int, int]:
    """Return (step, policy version) of a verified checkpoint after loading it into the models. Collective.

    note: takes sentences about parts that the checkpoint lacks.
    Raises: RefusedCheckpointError when the policy has another digest than the manifest.
    """
    roles.load_state(checkpoint.path / "state", note)
    _check_policy(roles.policy, checkpoint, note)
    failpoint("rank_checkpoint.state_loaded")
    return checkpoint.step, checkpoint.policy_version


def _check_policy(policy: PolicyEngine, checkpoint: Checkpoint, note: Report) -> None:
    other = checkpoint.policy_form != policy.digest_form and dist.get_rank() == 0
    # Rank 0 decides, because it computes the digest: other ranks' devices may differ, and all take part or none.
    if first_problem("another form" if other else None) is not None:
        note("The policy's digest is not compared: the checkpoint's is of another type or device.")
        return
    found = policy.pushed_digest()
    problem = None
    if dist.get_rank() == 0 and found != checkpoint.policy_digest:
        problem = f"the policy has the digest {found} after loading, and the manifest {checkpoint.policy_digest}"
    if (problem := first_problem(problem)) is not None:
        raise RefusedCheckpointError(f"The checkpoint {checkpoint.path} is refused: {problem}.")


def _files_digest(model: Path) -> str:
    return small_files_digest(read_small_files(model, with_code=True))


def _digest_of(model: Path, written: WrittenFiles) -> str:
    """Return the digest of all tensors that were written into a model folder."""
    files = [tensors for path, tensors in written.items() if path.parent == model]
    return digest_of_all({name: digest for tensors in files for name, digest in tensors.items()})
