"""The verdict on one checkpoint, with what it took to reach it."""

import resource
import time
from pathlib import Path

import torch

from learner.checkpoint.proof import Proof, Verdict, manifest_hash
from learner.rank.proof.model_form import as_saved
from learner.rank.proof.own_memory import own_peak_mib
from learner.rank.proof.prove import prove
from learner.rank.proof.refused import NotProvableError, RefusedError
from learner.rank.proof.request import ProofRequest
from protocol.settings.settings import Settings


def verdict(request: ProofRequest) -> Proof:
    """Return what is found; raises what kept it from being found, such as a lack of memory."""
    started = time.monotonic()
    torch.set_num_threads(1)
    folder, told = Path(request.folder), request.told
    manifest = manifest_hash(folder)
    settings = as_saved(Settings.model_validate_json(request.settings), told.made_with)
    found: Verdict = "proven"
    loss, problem = None, ""
    try:
        loss = prove(folder, told, settings, Path(request.model))
    except RefusedError as error:
        found, problem = "refused", str(error)
    except NotProvableError as error:
        found, problem = "not made", str(error)
    if found != "proven" and (not manifest or manifest_hash(folder) != manifest):
        found, problem = "not made", f"{folder} is gone, or other files took its place"
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Proof(
        verdict=found,
        problem=problem,
        step=told.step,
        digest=told.pushed if found == "proven" else "",
        loss=loss,
        seconds=time.monotonic() - started,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_mib=own_peak_mib(),
        manifest=manifest,
    )
