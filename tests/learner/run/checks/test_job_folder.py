"""A run that is submitted as a Ray job: what must not be in Ray's copy of its folder, nor outlive it."""

from pathlib import Path

import pytest

from learner.run.command import check_job_folder
from protocol.errors import SettingsError
from protocol.settings.settings import Settings

COPY = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")  # noqa: S108 a name: nothing is there


def settings(folder: str) -> Settings:
    return Settings.model_validate({"run": {"dir": folder}})


def test_run_folder_in_rays_copy_is_refused_and_elsewhere_is_not() -> None:
    with pytest.raises(SettingsError, match=r"run\.dir = runs is in Ray's copy of the job's folder"):
        check_job_folder(settings(f"{COPY}/runs"), COPY)
    check_job_folder(settings("/data/runs"), COPY)
    check_job_folder(settings("/work/runs"), Path("/work"), is_detached=True)


def test_run_that_would_outlive_its_job_is_refused() -> None:
    with pytest.raises(SettingsError) as refused:
        check_job_folder(settings("/data/runs"), COPY, is_detached=True)
    assert str(refused.value) == (
        "settings: --no-wait has the run outlive its Ray job, after which Ray deletes its copy of the job's folder. "
        "Leave it out here; ray job submit has a --no-wait of its own."
    )
