"""What the process that proves a checkpoint is asked, as one line of JSON. Imports no torch."""

from pathlib import Path

import msgspec

from learner.checkpoint.told import Told
from protocol.settings.settings import Settings


class ProofRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One checkpoint to prove."""

    folder: str  # the checkpoint's
    model: str  # the folder that the run's policy was first loaded from
    settings: str  # those that the run was given, as JSON
    told: Told  # what the ranks held when they saved


def make_request(folder: Path, model: Path, settings: Settings, told: Told) -> ProofRequest:
    return ProofRequest(
        folder=str(folder), model=str(model), settings=settings.model_dump_json(exclude_unset=True), told=told
    )
