"""The command as it is typed: which settings it takes, and what it answers before anything starts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from learner.run.command import SECTIONS, USUAL, check_job_folder, main
from protocol.errors import SettingsError
from protocol.settings.loader import describe_settings
from protocol.settings.settings import Settings
from tests.fakes.tiny_models import make_tiny_model
from tests.flow.refusals import no_cluster_in, run_without_cluster


def answer(folder: Path, *options: str) -> tuple[int, str]:
    """Return (exit status, stderr) of the command, in a SLUICE_HOME where no cluster runs."""
    done = run_without_cluster(folder / "home", options)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize("options", [(), ("--learner.lr", "1e-3"), ("--config", "quickstart", "--policy.model", "m")])
def test_command_without_a_model_or_prompts_is_the_quick_start(tmp_path: Path, options: tuple[str, ...]) -> None:
    # The quick start's files are made with the cluster.
    assert answer(tmp_path, *options) == (1, no_cluster_in(tmp_path / "home"))


def test_command_that_names_a_model_gets_nothing_of_the_quick_start(tmp_path: Path) -> None:
    status, says = answer(tmp_path, "--policy.model", str(tmp_path / "mine"))
    assert (status, says) == (
        2,
        f"settings: policy.model = {tmp_path}/mine is not a folder. Give one that holds a model.",
    )


def test_command_that_names_prompts_gets_no_model_of_the_quick_start(tmp_path: Path) -> None:
    status, says = answer(tmp_path, "--data.train", str(tmp_path / "mine.jsonl"))
    assert (status, says) == (2, "settings: policy.model is not set. Give a model folder or a Hugging Face name.")


def test_second_settings_file_is_refused(tmp_path: Path) -> None:
    status, says = answer(tmp_path, "--config", "one.yaml", "--config=two.yaml")
    assert (status, says) == (2, "settings: --config is given twice, as one.yaml and as two.yaml. Give one file.")


def test_folder_of_the_user_with_our_rooms_names_does_not_stand_in_for_them(tmp_path: Path) -> None:
    for room in ("protocol", "deploy", "rewards"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    finished = subprocess.run(
        [sys.executable, "-m", "learner.run", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert (finished.returncode, finished.stderr) == (0, "")


def test_help_has_one_usage_and_the_usual_settings_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "print the place of each process" in shown
    assert "YAML file of settings" in shown
    assert shown.count("usage:") == 1
    assert [name for name in USUAL if f"  --{name} " not in shown] == []
    assert len(shown.splitlines()) <= 50


@pytest.mark.parametrize("section", [*SECTIONS, "policy.lora"])
def test_help_of_a_section_has_its_settings_alone(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", section]) == 0
    shown = re.findall(r"^  --(\S+\.\w+)", capsys.readouterr().out, re.M)
    names = [name for name, _, _ in describe_settings(Settings())]
    assert {name for name in shown if name in names} == {name for name in names if name.startswith(f"{section}.")}


def test_help_of_an_unknown_section_names_the_likeliest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "lerner"]) == 2
    assert capsys.readouterr().err.endswith("health, report. Did you mean learner?\n")


def test_settings_and_paths_in_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "[model]", tied=True)
    (tmp_path / "[b].jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    given = {
        "policy.model": tmp_path / "[model]",
        "data.train": tmp_path / "[b].jsonl",
        "run.dir": tmp_path / "[r]",
        "rewards.endpoints": '[{"name": "a", "url": "http://127.0.0.1:1/"}]',
        "rollout.max_context_tokens": 64,
        "rollout.max_response_tokens": 8,
        "sampling.stop": '["[/INST]"]',
    }
    options = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    shown = run_without_cluster(tmp_path / "home", options)
    assert (shown.returncode, shown.stderr) == (
        1,
        f"{no_cluster_in(tmp_path / 'home')}\n",
    )
    assert '["[/INST]"]' in shown.stdout
    assert f"{tmp_path}/[r]" in shown.stdout
    plan = run_without_cluster(tmp_path / "home", [*options, "--plan"])
    assert (plan.returncode, f"Run folder {tmp_path}/[r]/run." in plan.stdout) == (0, True)


# -- a run as a Ray job

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
