"""What the ranks held in memory when they saved: what a checkpoint's files are measured against.

It goes to the proof directly, and into the checkpoint as `told.json`, so that a later start can prove what a death left
unproven. A checkpoint without it is of a version that proved nothing.
"""

from pathlib import Path
from typing import Any

import msgspec

from learner.checkpoint.manifest import CorruptCheckpointError

TOLD = "told.json"
SCHEMA = 1


class ToldModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A trained model as its ranks held it."""

    num_updates: int  # optimizer updates inside
    digests: dict[str, str]  # "weight/NAME", "exp_avg/NAME", "exp_avg_sq/NAME" -> digest of the whole float32 tensor
    answers: list[float]  # policy: logprobs of the kept texts' tokens but their first; critic: values before these
    # digest of all weights, of all first and of all second moments in the checkpoint before; empty: there was none
    before: dict[str, str] = {}
    must_differ: bool = False  # since then an update was applied whose gradient and learning rate were above 0


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that is told of one checkpoint."""

    schema: int = SCHEMA
    run_id: str  # the run that saved
    step: int  # the last step inside
    policy_version: int  # of the weights
    pushed: str  # digest of all weights as they are pushed: what the servers hold
    texts: list[list[int]]  # the kept batch: token ids of each text
    models: dict[str, ToldModel]  # by role: policy, critic
    reference: str | None = None  # digest of the reference's weights; None: it is in no checkpoint
    memory: dict[str, float] = {}  # what the objective knows of earlier steps
    random: list[str]  # SHA-256 of each rank's random generators as they are written, by rank
    made_with: dict[str, dict[str, Any]] = {}  # section -> setting -> value: what the models' form depends on
    step_before: int | None = None  # of the checkpoint before; None: there was none


def write_told(folder: Path, told: Told) -> None:
    """Put it into a checkpoint that is being written. Raises: OSError."""
    (folder / TOLD).write_bytes(msgspec.json.encode(told))


def read_told(folder: Path) -> Told | None:
    """Return what a checkpoint's ranks told; None for one of a version that told nothing.

    Raises: CorruptCheckpointError when it cannot be read.
    """
    try:
        told = msgspec.json.decode((folder / TOLD).read_bytes(), type=Told)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"{folder / TOLD} cannot be read: {error}") from None
    if told.schema != SCHEMA:
        raise CorruptCheckpointError(f"{folder / TOLD} is not of schema {SCHEMA}")
    return told
