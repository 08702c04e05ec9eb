"""deploy/setup.sh: what is missing is said in one sentence; a finished set-up is found at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "bash dirname grep cat sha256sum cut df awk mkdir flock rm tr env touch"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with what set-up reads, and a bin/ for a PATH of its own."""
    folder = tmp_path / "clone"
    (folder / "deploy").mkdir(parents=True)
    for name in ("deploy/setup.sh", "deploy/pip_settings.py", "pyproject.toml", "requirements-cpu.lock"):
        shutil.copy(ROOT / name, folder / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS.split():
        (tools / tool).symlink_to(str(shutil.which(tool)))
    return folder


def set_up(clone: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    path = environment.pop("PATH", str(clone.parent / "bin"))
    return subprocess.run(
        ["bash", str(clone / "deploy" / "setup.sh")],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PATH": path, "HOME": str(clone), **environment},
    )


def offer(clone: Path, name: str, text: str) -> None:
    tool = clone.parent / "bin" / name
    tool.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    tool.chmod(0o755)


@pytest.fixture
def ready(clone: Path) -> Path:
    """Return a clone with a compiler, and a uv that writes its arguments to `calls`."""
    shutil.copy(ROOT / "requirements-gpu.lock", clone)
    offer(clone, "g++", "exit 0")
    offer(clone, "uv", f'echo "$*" >>{clone}/calls')
    return clone


def test_missing_python_is_said_with_what_was_found(clone: Path) -> None:
    offer(clone, "python3", 'if [[ $1 == --version ]]; then echo "Python 3.9.2"; else exit 1; fi')
    refused = set_up(clone)
    assert (refused.returncode, refused.stderr) == (
        1,
        "setup: Python 3.11 is needed; found Python 3.9.2. Install it (where no package has it: uv python install "
        "3.11), or name it in SLUICE_PYTHON.\n",
    )


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"SLUICE_PYTHON": sys.executable},
            "a C++ compiler is needed, and g++ is not on PATH. Install it (Debian: g++).",
        ),
        (
            {"SLUICE_PYTHON": "/nowhere/python"},
            "SLUICE_PYTHON=/nowhere/python is none; Python 3.11 is needed. Name one, or unset it.",
        ),
        (
            {"SLUICE_LOCK": "tpu"},
            "SLUICE_LOCK=tpu is not known. Use cpu, gpu or none, or unset it: then nvidia-smi is asked.",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(clone: Path, environment: dict[str, str], sentence: str) -> None:
    offer(clone, "python3.11", f'exec {sys.executable} "$@"')
    refused = set_up(clone, **environment)
    assert (refused.returncode, refused.stderr) == (1, f"setup: {sentence}\n")


def test_full_disk_is_said_before_anything_is_made(clone: Path) -> None:
    offer(clone, "g++", "exit 0")
    (clone.parent / "bin" / "df").unlink()
    offer(clone, "df", 'printf "Filesystem x\\nroot 9 8 1048576 9%% /\\n"')
    refused = set_up(clone, SLUICE_PYTHON=sys.executable)
    message = f"setup: {clone} has 1 GiB free, and the packages need 6 GiB. Free some space.\n"
    assert (refused.returncode, refused.stderr) == (1, message)
    assert not (clone / ".venv").exists()


def test_index_out_of_reach_is_said(clone: Path) -> None:
    offer(clone, "g++", "exit 0")
    offer(clone, "uv", 'echo "error: Request failed: error sending request for url" >&2; exit 2')
    refused = set_up(clone, SLUICE_PYTHON=sys.executable)
    assert refused.returncode == 1
    assert refused.stderr == (
        "setup: the package index is out of reach (see .venv/setup.log). "
        "Check the network, or name a mirror in PIP_INDEX_URL.\n"
    )
    assert not (clone / ".venv" / ".stamp").exists()


def test_uv_gets_the_lock_pips_settings_and_the_project(clone: Path) -> None:
    offer(clone, "g++", "exit 0")
    offer(clone, "uv", f'echo "$UV_FIND_LINKS $*" >>{clone}/calls')
    done = set_up(clone, SLUICE_PYTHON=sys.executable, PIP_FIND_LINKS="/somewhere")
    assert done.returncode == 0, done.stderr
    pip = "/somewhere pip install --python .venv/bin/python"
    assert (clone / "calls").read_text(encoding="utf-8").splitlines() == [
        f"{pip} --no-deps --dry-run --quiet torch==2.13.0+cpu",
        f"{pip} --quiet --no-deps --requirement requirements-cpu.lock",
        f"{pip} --quiet --no-deps --no-build-isolation --editable .",
    ]
    again = set_up(clone, SLUICE_PYTHON=sys.executable)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len((clone / "calls").read_text(encoding="utf-8").splitlines()) == 3


def test_torch_comes_from_pytorchs_index_when_the_users_indices_have_none(clone: Path) -> None:
    offer(clone, "g++", "exit 0")
    offer(clone, "uv", f'echo "$*" >>{clone}/calls; [[ $* != *--dry-run* ]]')
    assert set_up(clone, SLUICE_PYTHON=sys.executable).returncode == 0
    assert "--index https://download.pytorch.org/whl/cpu --requirement" in (clone / "calls").read_text(encoding="utf-8")


def test_changed_lock_is_installed_again(ready: Path) -> None:
    set_up(ready, SLUICE_PYTHON=sys.executable)
    with open(ready / "requirements-cpu.lock", "a", encoding="utf-8") as lock:
        lock.write("another==1.0\n")
    assert "installing requirements-cpu.lock" in set_up(ready, SLUICE_PYTHON=sys.executable).stdout


def test_path_with_a_space_is_refused_before_anything_is_made(clone: Path) -> None:
    spaced = clone.rename(clone.with_name("a clone"))
    refused = set_up(spaced, SLUICE_PYTHON=sys.executable)
    assert (refused.returncode, refused.stderr) == (
        1,
        f"setup: the path {spaced} has a space or a colon, and the engine cannot run there. "
        "Move the checkout to a path without.\n",
    )
    assert not (spaced / ".venv").exists()


def test_set_up_is_found_through_a_link_to_the_folder(ready: Path) -> None:
    assert set_up(ready, SLUICE_PYTHON=sys.executable).returncode == 0
    link = ready.with_name("link")
    link.symlink_to(ready)
    again = set_up(link)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_interpreter_of_the_set_up_is_kept_whatever_stands_first_on_the_path(ready: Path) -> None:
    assert set_up(ready, SLUICE_PYTHON=sys.executable).returncode == 0
    before = (ready / ".venv" / "bin" / "python").resolve()
    offer(ready, "python3.11", f"touch {ready}/asked; exit 1")
    with open(ready / "requirements-cpu.lock", "a", encoding="utf-8") as lock:
        lock.write("another==1.0\n")
    again = set_up(ready)
    assert again.returncode == 0, again.stderr
    assert (ready / ".venv" / "bin" / "python").resolve() == before
    assert not (ready / "asked").exists()


def test_python_without_ensurepip_is_said_and_leaves_the_virtual_environment_as_it_is(clone: Path) -> None:
    offer(clone, "g++", "exit 0")
    offer(clone, "bare", f'[[ $* != *"import ensurepip"* ]] || exit 1; exec {sys.executable} "$@"')
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").write_text("the old one")
    # Its own path is what is asked afterwards: it must be the bare one's.
    setup = clone / "deploy" / "setup.sh"
    setup.write_text(setup.read_text().replace("print(base)", f'print("{clone.parent}/bin/bare")'))
    refused = set_up(clone, SLUICE_PYTHON="bare")
    assert refused.returncode == 1
    assert "cannot make a virtual environment. Install its venv module (Debian: python3.11-venv)." in refused.stderr
    assert (clone / ".venv" / "bin" / "python").read_text() == "the old one"


def test_packages_are_kept_in_the_virtual_environment_when_home_cannot_be_written(clone: Path) -> None:
    offer(clone, "g++", "exit 0")
    offer(clone, "uv", f'echo "$UV_CACHE_DIR" >>{clone}/caches')
    done = set_up(clone, SLUICE_PYTHON=sys.executable, HOME="/proc/nobody")
    assert done.returncode == 0, done.stderr
    assert "setup: /proc/nobody/.cache/uv cannot be written; packages are kept in" in done.stdout
    assert set((clone / "caches").read_text().splitlines()) == {f"{clone}/.venv/.uv-cache"}


def test_lock_that_is_asked_for_is_installed_where_no_gpu_is(ready: Path) -> None:
    done = set_up(ready, SLUICE_PYTHON=sys.executable, SLUICE_LOCK="gpu")
    assert done.returncode == 0, done.stderr
    assert "--no-deps --requirement requirements-gpu.lock" in (ready / "calls").read_text(encoding="utf-8")
    again = set_up(ready, SLUICE_LOCK="gpu")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_machine_of_several_gpus_gets_the_cuda_lock_however_slowly_they_are_listed(ready: Path) -> None:
    (ready.parent / "bin" / "sleep").symlink_to(str(shutil.which("sleep")))
    offer(ready, "nvidia-smi", 'for number in 0 1; do echo "GPU $number: NVIDIA H100"; sleep 0.3; done')
    done = set_up(ready, SLUICE_PYTHON=sys.executable)
    assert "setup: installing requirements-gpu.lock" in done.stdout


def test_packages_of_another_kind_of_machine_are_not_replaced_unasked(ready: Path) -> None:
    assert set_up(ready, SLUICE_PYTHON=sys.executable, SLUICE_LOCK="gpu").returncode == 0
    installed = (ready / "calls").read_text(encoding="utf-8")
    refused = set_up(ready, SLUICE_PYTHON=sys.executable)
    assert (refused.returncode, refused.stderr) == (
        1,
        f"setup: {ready}/.venv has requirements-gpu.lock, and this machine is one for requirements-cpu.lock. "
        "Set SLUICE_LOCK=gpu to use it as it is, SLUICE_LOCK=cpu to have it replaced, for all machines that share "
        "it.\n",
    )
    assert (ready / "calls").read_text(encoding="utf-8") == installed
    assert set_up(ready, SLUICE_PYTHON=sys.executable, SLUICE_LOCK="cpu").returncode == 0
    assert set_up(ready).returncode == 0


def test_virtual_environment_that_somebody_else_made_is_left_alone(clone: Path) -> None:
    refused = set_up(clone, SLUICE_LOCK="none")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"setup: SLUICE_LOCK=none, and {clone}/.venv is not there. Make it, or unset SLUICE_LOCK.\n",
    )
    offer(clone, "python", "exit 1")
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone.parent / "bin" / "python").rename(clone / ".venv" / "bin" / "python")
    done = set_up(clone, SLUICE_LOCK="none")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_pythonhome_of_another_python_does_no_harm(ready: Path) -> None:
    done = set_up(ready, SLUICE_PYTHON=sys.executable, PYTHONHOME="/nowhere")
    assert done.returncode == 0, done.stderr


def test_strangers_may_write_nothing_whatever_the_users_umask(ready: Path) -> None:
    before = os.umask(0)
    try:
        assert set_up(ready, SLUICE_PYTHON=sys.executable).returncode == 0
    finally:
        os.umask(before)
    paths = [path for path in (ready / ".venv").rglob("*") if not path.is_symlink()]
    assert [path for path in paths if path.stat().st_mode & 0o002] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written_is_said(clone: Path) -> None:
    offer(clone, "g++", "exit 0")
    clone.chmod(0o555)
    refused = set_up(clone, SLUICE_PYTHON=sys.executable)
    assert (refused.returncode, refused.stderr) == (
        1,
        f"setup: {clone} cannot be written. Work in a clone of your own.\n",
    )


@pytest.mark.parametrize(("driver", "is_refused"), [("550.54.15", True), ("580.65.06", False)])
def test_driver_that_is_too_old_for_the_gpu_lock_is_refused(clone: Path, driver: str, is_refused: bool) -> None:
    shutil.copy(ROOT / "requirements-gpu.lock", clone)
    offer(clone, "nvidia-smi", f'[[ $1 == -L ]] && echo "GPU 0: H100" || echo {driver}')
    said = set_up(clone).stderr
    assert (f"the NVIDIA driver is {driver}, and CUDA 13 needs 580 or newer." in said) is is_refused
    assert "NVIDIA driver" not in set_up(clone, SLUICE_LOCK="gpu").stderr


def test_driver_that_does_not_answer_is_said(ready: Path) -> None:
    offer(ready, "nvidia-smi", 'echo "NVIDIA-SMI has failed because it could not communicate"; exit 9')
    done = set_up(ready, SLUICE_PYTHON=sys.executable)
    assert "nvidia-smi fails here (NVIDIA-SMI has failed because it could not communicate), so the" in done.stderr
    assert "setup: installing requirements-gpu.lock" not in done.stdout


@pytest.mark.parametrize(("cuda", "is_refused"), [("None", True), ("'13.0'", False)])
def test_torch_without_cuda_is_refused_where_the_gpu_lock_was_installed(
    clone: Path, cuda: str, is_refused: bool
) -> None:
    shutil.copy(ROOT / "requirements-gpu.lock", clone)
    offer(clone, "g++", "exit 0")
    made = '.venv/lib/python3.11/site-packages/torch && echo "class version: cuda = ' + cuda + '" >"$_/__init__.py"'
    offer(clone, "uv", f"mkdir -p {made}")
    done = set_up(clone, SLUICE_PYTHON=sys.executable, SLUICE_LOCK="gpu")
    assert ("the index gave a torch without CUDA for requirements-gpu.lock." in done.stderr) is is_refused
    assert done.returncode == is_refused
