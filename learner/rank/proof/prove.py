"""The proof of one checkpoint: what a resume would load from its files is what the ranks held when they saved.

    manifest, roles, memory, random generators, ledger   are of this step, run and model
    state/ROLE    each master weight and moment has the digest that the ranks found in their own memory
    policy        built from its state, it has the digest that the servers hold, and the loss that the ranks computed
    model/        the exported weights have that digest too
    critic        built from its state, it says of the kept texts what the ranks' critic said
    reference     has the digest of the ranks' reference

One model is in memory at a time, in policy.dtype, and one tensor of the state beside it; no optimizer, no DeepSpeed.
"""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

from safetensors import SafetensorError

from learner.checkpoint.manifest import CorruptCheckpointError, look_at
from learner.checkpoint.told import Told, read_told
from learner.disk.layout import LEDGER
from learner.disk.model_folder import find_named_model, model_digest
from learner.models.settings import critic_settings, policy_settings
from learner.models.weights.digested import digest_of_folder
from learner.rank.proof.models import check_critic, check_policy
from learner.rank.proof.refused import NotProvableError, RefusedError
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

_NO_MODELS = ("memory.json", "reference")


def prove(folder: Path, told: Told, settings: Settings, model: Path) -> float:
    """Return the loss of the kept texts by the weights in the files. model: the folder that the run began from.

    Raises: RefusedError when the checkpoint is not what was told; NotProvableError and anything else: nothing is shown.
    """
    _check_it_can_be_read(folder, model)
    try:
        _check_facts(folder, told, model)
        _check_roles(folder, told)
        _check_memory(folder, told)
        _check_random(folder, told)
        _check_ledger(folder, told)
        _check_reference(folder, told)
        if "critic" in told.models:
            check_critic(folder / "state" / "critic", told, critic_settings(settings, _critic_source(settings, model)))
        return check_policy(folder, told, policy_settings(settings, model))
    except (SafetensorError, FileNotFoundError, KeyError, ValueError) as error:
        raise RefusedError(f"it cannot be read as a resume would: {error}") from error


def _check_it_can_be_read(folder: Path, model: Path) -> None:
    """Raise NotProvableError when a file is there that this process cannot open, or the run's model is not there."""
    if not (model / "config.json").is_file():
        raise NotProvableError(f"the model folder {model}, which the run began with, is not there")
    for path in folder.rglob("*"):
        try:
            # Asked by itself: safetensors says of any file that it cannot open that there is none.
            if path.is_file():
                path.open("rb").close()
        except FileNotFoundError:
            continue  # what is missing is shown to be
        except OSError as error:
            raise NotProvableError(f"{path} cannot be opened: {error.strerror}") from None


def _critic_source(settings: Settings, model: Path) -> Path:
    try:
        return find_named_model("critic.model", settings.critic.model) if settings.critic.model else model
    except SettingsError as error:
        raise NotProvableError(str(error)) from None


def _check_facts(folder: Path, told: Told, model: Path) -> None:
    try:
        found = look_at(folder)
        if read_told(folder) != told:
            raise RefusedError("told.json is not what the ranks told when they saved")
    except CorruptCheckpointError as error:
        raise RefusedError(str(error)) from None
    facts = (found.step, found.policy_version, found.run_id, found.model_digest)
    if facts != (told.step, told.policy_version, told.run_id, model_digest(model)):
        raise RefusedError(
            f"its manifest is of step {found.step} and policy version {found.policy_version} of {found.run_id}, the "
            f"ranks saved step {told.step} and version {told.policy_version} of {told.run_id}; or the model is another"
        )


def _check_roles(folder: Path, told: Told) -> None:
    expected = {*told.models, *(["memory.json"] if told.memory else []), *(["reference"] if told.reference else [])}
    if (present := {path.name for path in (folder / "state").iterdir()}) != expected:
        raise RefusedError(f"state/ holds {sorted(present)}, the ranks saved {sorted(expected)}")


def _check_memory(folder: Path, told: Told) -> None:
    if told.memory and json.loads((folder / "state" / "memory.json").read_bytes()) != told.memory:
        raise RefusedError("state/memory.json is not what the objective knew when the ranks saved")


def _check_random(folder: Path, told: Told) -> None:
    found = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "random").iterdir())]
    if found != told.random:
        raise RefusedError("the random generators in random/ are not those of the ranks when they saved")


def _check_ledger(folder: Path, told: Told) -> None:
    """The newest step that the ledger's copy accounts for is the checkpoint's; a run without prompts accounts none."""
    newest = "SELECT MAX(step) FROM prompts WHERE state IN ('trained', 'skipped')"
    try:
        with closing(sqlite3.connect(f"{(folder / LEDGER).resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as db:
            step = db.execute(newest).fetchone()[0]
    except sqlite3.Error as error:
        raise RefusedError(f"its copy of the ledger cannot be read: {error}") from None
    if (step or 0) != told.step:
        raise RefusedError(f"its copy of the ledger accounts for steps up to {step}, and it is of step {told.step}")


def _check_reference(folder: Path, told: Told) -> None:
    if told.reference and digest_of_folder(folder / "state" / "reference") != told.reference:
        raise RefusedError("state/reference is not the reference that the ranks held")
