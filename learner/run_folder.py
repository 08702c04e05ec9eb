"""The run folder: where a run starts from and what it may overwrite.

Used by the driver before anything starts. Layout (design section 10): settings.yaml, metrics.jsonl, ledger.sqlite,
checkpoints/step_000100/, logs/, report.html.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from learner.checkpoint import Checkpoint, newest_valid, open_checkpoint
from protocol.errors import OperatorError, SettingsError
from protocol.settings import RunSettings, Settings
from protocol.settings_loader import save_settings

LEDGER = "ledger.sqlite"
CHECKPOINTS = "checkpoints"
_RECORDS = ("metrics.jsonl", "samples.jsonl")


@dataclass(frozen=True)
class RunStart:
    """checkpoint: what the run resumes from, None for a new one. notice: a choice that the user should see."""

    folder: Path
    checkpoint: Checkpoint | None
    notice: str | None = None

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


def plan_start(run: RunSettings, model_digest: str) -> RunStart:
    """Return where the run starts, touching nothing.

    auto: the newest valid checkpoint of this name; when that run is complete, a new run under the next free name.
    Raises: SettingsError for a checkpoint of another model, a path without a valid checkpoint, or resume=never on a
    folder that holds a run.
    """
    folder = Path(run.dir) / run.name
    if run.resume not in ("auto", "never"):
        return RunStart(folder, _of_model(open_checkpoint(Path(run.resume)), model_digest))
    if not (folder / LEDGER).exists():
        return RunStart(folder, None)
    if run.resume == "never":
        raise SettingsError(
            f"settings: run.resume = never, and {folder} holds a run already. "
            "Choose another run.name, or resume with auto."
        )
    checkpoint = newest_valid(folder / CHECKPOINTS)
    if checkpoint is None:
        return RunStart(folder, None, f"{folder} holds a run without a valid checkpoint: it starts again from step 0.")
    if checkpoint.step >= run.max_steps:
        free = _next_free(folder)
        return RunStart(free, None, f"{folder} is complete at step {checkpoint.step}: this is a new run, {free.name}.")
    return RunStart(folder, _of_model(checkpoint, model_digest), f"Resuming {folder} from step {checkpoint.step}.")


def plan_restart(start: RunStart) -> RunStart:
    """Return where a run goes on that started at `start` and died: its newest valid checkpoint, or `start` again."""
    return RunStart(start.folder, newest_valid(start.folder / CHECKPOINTS) or start.checkpoint)


def prepare_folder(start: RunStart, settings: Settings) -> None:
    """Make the folder ready: free of an earlier life's accounts, or with the ledger of the checkpoint it resumes from.

    Raises: OperatorError when it cannot be written; a folder that was not there before is then gone again.
    """
    folder = start.folder
    is_new = not folder.exists()
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        for leftover in (f"{LEDGER}-wal", f"{LEDGER}-shm"):
            (folder / leftover).unlink(missing_ok=True)
        if start.checkpoint is not None:
            shutil.copyfile(start.checkpoint.path / LEDGER, folder / LEDGER)
            for name in _RECORDS:
                _cut_back(folder / name, start.checkpoint.step)
        elif (folder / LEDGER).exists():
            # A run that died before its first checkpoint left accounts of weights that no longer exist.
            for name in (LEDGER, *_RECORDS):
                if (folder / name).exists():
                    (folder / name).rename(folder / "logs" / f"before_{_mtime(folder / name)}_{name}")
        save_settings(settings, folder / "settings.yaml")
    except OSError as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise OperatorError(
            f"The run folder {folder} cannot be written: {error.strerror}. Set run.dir to a folder on a disk with room."
        ) from None


def model_digest(model_dir: Path) -> str:
    """Return a hash of the model's shape and tokenizer: what a checkpoint must agree on, whatever its weights."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (model_dir / name).is_file():
            digest.update(name.encode() + b"\0" + (model_dir / name).read_bytes())
    return digest.hexdigest()


def _of_model(checkpoint: Checkpoint, digest: str) -> Checkpoint:
    if checkpoint.model_digest != digest:
        raise SettingsError(
            f"settings: {checkpoint.path} is a checkpoint of another model than policy.model. "
            "Give the model it was made from, another run.name, or run.resume never."
        )
    return checkpoint


def _cut_back(record: Path, step: int) -> None:
    """Keep a record's lines up to this step: later ones tell of weights that no longer exist, and will be told anew."""
    if not record.exists():
        return
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    aside = record.with_name(f".{record.name}")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(record)


def _next_free(folder: Path) -> Path:
    number = 2
    while (free := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return free


def _mtime(path: Path) -> int:
    return int(path.stat().st_mtime)
