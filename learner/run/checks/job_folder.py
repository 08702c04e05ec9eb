"""A run that is submitted as a Ray job works in a copy of its folder, which Ray deletes some time after the job."""

from pathlib import Path

from protocol.errors import SettingsError
from protocol.settings.settings import Settings

# Where Ray puts what `ray job submit --working-dir` sent.
_COPIES = "working_dir_files"


def check_job_folder(settings: Settings, working_folder: Path, *, is_detached: bool = False) -> None:
    """Raise SettingsError where the run folder would be in Ray's copy, or the run would outlive the job.

    settings: with absolute paths. is_detached: --no-wait.
    """
    if _COPIES not in working_folder.parts:
        return
    if is_detached:
        raise SettingsError(
            "settings: --no-wait has the run outlive its Ray job, after which Ray deletes its copy of the job's folder."
            " Leave it out here; ray job submit has a --no-wait of its own."
        )
    folder = Path(settings.run.dir)
    if folder.is_relative_to(working_folder):
        raise SettingsError(
            f"settings: run.dir = {folder.relative_to(working_folder)} is in Ray's copy of the job's folder, which Ray "
            "deletes after the job. Give run.dir a whole path, such as --run.dir /data/runs."
        )
