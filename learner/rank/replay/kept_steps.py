"""What each rank was given for a step, kept in files from which the step can be trained again:

    batches/step_000101/rank_0     share of the batch, settings, random state, digest of the weights before the step
    batches/step_000101/rank_1
    batches/step_000101/outcome    the step's figures; missing while it runs, and after a crash in it

Each file ends with the SHA-256 of what is before it.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
import yaml

from learner.objectives.policy_gradient import StepOutcome
from learner.rank.coordinator_client import BATCH_LIMITS, open_batch
from protocol.disk.files import naming_disk_errors, replace_file
from protocol.errors import FrameError, OperatorError
from protocol.settings.settings import Settings
from protocol.wire.codec import Decoder, encode
from protocol.wire.messages import Batch
from protocol.wire.trajectory import Trajectory

FOLDER = "batches"
_OUTCOME = "outcome"
_HASH_BYTES = 32

T = TypeVar("T", bound=msgspec.Struct)


class Objective(Protocol):
    """The loss of a run: takes its steps on this rank."""

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome: ...


class KeptShare(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank was given for a step."""

    frames: list[bytes]  # Batch as on the wire
    policy_version: int  # version of the weights before the step
    weights_digest: str  # digest of these weights as the servers verified them; empty: none, or not rank 0
    settings: str  # resolved settings, YAML
    given: str  # settings as given, YAML
    random_states: list[bytes]  # torch's, of the CPU and of the GPU if there is one
    num_threads: int  # torch's threads: sums round by their number
    machine: str  # torch's version and the kind of processor


class KeptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step. The figures are exact; metrics.jsonl rounds them."""

    applied: bool
    detail: str
    metrics: dict[str, float]


class KeptSteps:
    """An objective whose steps are kept, the newest `learner.keep_batches` of them."""

    def __init__(
        self, objective: Objective, settings: Settings, folder: Path, weights_digest: Callable[[], str]
    ) -> None:
        """folder: the run's. weights_digest: returns on rank 0 the digest of the weights as the servers verified them.

        Raises on a step: OperatorError when the disk refuses.
        """
        self._objective = objective
        self._root = folder / FOLDER
        self._num_kept = settings.learner.keep_batches
        self._weights_digest = weights_digest
        self._texts = {
            "settings": yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False),
            "given": yaml.safe_dump(settings.given_settings(), sort_keys=False),
        }

    def take_step(self, batch: Batch, trajectories: Mapping[int, Trajectory], policy_version: int) -> StepOutcome:
        """Take the objective's step. The share is on the disk before it begins."""
        rank, step = dist.get_rank(), step_folder(self._root, batch.step)
        order = [index for part in batch.micro_batches for index in part]
        share = KeptShare(
            frames=encode(
                msgspec.structs.replace(batch, is_joined=msgspec.UNSET),
                [buffer for index in order for buffer in trajectories[index].to_buffers()],
            ),
            policy_version=policy_version,
            weights_digest=self._weights_digest(),
            random_states=[state.numpy().tobytes() for state in _random_states()],
            num_threads=torch.get_num_threads(),
            machine=describe_machine(),
            **self._texts,
        )
        with _naming_disk_errors(step):
            step.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                (step / _OUTCOME).unlink(missing_ok=True)  # of an earlier start
                self._remove_others(batch.step)
            _write(step / f"rank_{rank}", share)
        outcome = self._objective.take_step(batch, trajectories, policy_version)
        if rank == 0:
            kept = KeptOutcome(applied=outcome.applied, detail=outcome.detail, metrics=outcome.metrics)
            with _naming_disk_errors(step):
                _write(step / _OUTCOME, kept)
        return outcome

    def _remove_others(self, step: int) -> None:
        """Remove old steps, and later ones, which are of a lost start."""
        for number, folder in kept_steps(self._root).items():
            if not step - self._num_kept < number <= step:
                shutil.rmtree(folder)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def kept_steps(root: Path) -> dict[int, Path]:
    """Return the folder of each kept step, in order."""
    numbers = {path.name.removeprefix("step_"): path for path in root.glob("step_*")}
    return dict(sorted((int(number), path) for number, path in numbers.items() if number.isdecimal()))


def read_share(folder: Path, rank: int) -> KeptShare:
    """Return a rank's share of a kept step. Raises: OperatorError for a missing or changed file."""
    return _read(folder / f"rank_{rank}", KeptShare)


def read_outcome(folder: Path) -> KeptOutcome | None:
    """Return a kept step's result; None when it never ended. Raises: OperatorError for a changed file."""
    return _read(folder / _OUTCOME, KeptOutcome) if (folder / _OUTCOME).exists() else None


def open_share(share: KeptShare) -> tuple[Batch, dict[int, Trajectory]]:
    """Return a share's batch with its trajectories by index. Raises: OperatorError of another version of Sluice."""
    try:
        batch, buffers = Decoder[Batch](Batch, BATCH_LIMITS).decode(share.frames)
    except FrameError as error:
        raise OperatorError(f"The batch is of another version of Sluice ({error}). Replay it with that one.") from None
    return open_batch(batch, buffers)


def restore_random(share: KeptShare) -> None:
    """Bring torch's random state back to what it was before the step."""
    states = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in share.random_states]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def describe_machine() -> str:
    """Return what decides how sums round: torch's version and the kind of processor."""
    is_gpu = torch.cuda.is_available()
    kind = torch.cuda.get_device_name() if is_gpu else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__} on {kind}"


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def _write(path: Path, content: msgspec.Struct) -> None:
    encoded = msgspec.msgpack.encode(content)
    replace_file(path, encoded + hashlib.sha256(encoded).digest())


def _naming_disk_errors(folder: Path) -> AbstractContextManager[None]:
    cure = "Free the disk, or set learner.keep_batches to 0; then run the same command again."
    return naming_disk_errors(f"The batch cannot be kept in {folder}", cure)


def _read(path: Path, kind: type[T]) -> T:
    with naming_disk_errors(f"{path} cannot be read", "Give a whole copy of the run's folder."):
        content = path.read_bytes()
    encoded, digest = content[:-_HASH_BYTES], content[-_HASH_BYTES:]
    found = hashlib.sha256(encoded).digest()
    if found != digest:
        raise OperatorError(
            f"{path} was changed after it was written: its SHA-256 is {found.hex()}, expected {digest.hex()}. Give an "
            "unchanged copy."
        )
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except msgspec.ValidationError as error:
        raise OperatorError(f"{path} is of another version of Sluice ({error}). Replay it with that one.") from None
