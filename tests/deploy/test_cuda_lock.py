"""The CUDA lock can be installed, as far as a package index can tell: nothing is downloaded or built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
_UV = Path(sys.executable).with_name("uv")
# What uv says where there is nobody to ask, or where a mirror has a part of the packages alone.
_NOBODY_ANSWERS = ("not found in the package registry", "network", "connect", "timed out", "fetch", "dns", "sending")
_LIMIT_S = 120.0


def test_the_cuda_lock_takes_no_build_of_torch_for_cpus() -> None:
    lines = [line.partition(" ")[0] for line in (ROOT / "requirements-gpu.lock").read_text().splitlines()]
    (torch,) = [Requirement(line) for line in lines if line.startswith("torch=")]
    version = next(iter(torch.specifier)).version
    assert version in torch.specifier
    assert f"{version}+cpu" not in torch.specifier  # a folder of wheels or another index may have it


@pytest.mark.skipif(not _UV.exists(), reason="set-up left no uv here")
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_every_package_of_the_cuda_lock_can_be_had_and_agrees_with_the_others(version: str, tmp_path: Path) -> None:
    settings = subprocess.run(
        [sys.executable, "deploy/pip_settings.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    environment = os.environ | dict(line.split("=", 1) for line in settings.stdout.splitlines())
    # DeepSpeed comes as source; what it would build at installation it builds when it is used, or never.
    options = ["--only-binary", ":all:", "--no-binary", "deepspeed", "--index-strategy", "unsafe-best-match"]
    options += ["--python-version", version, "--python-platform", "x86_64-manylinux_2_31", "--target", str(tmp_path)]
    command = [str(_UV), "pip", "install", "--dry-run", "--requirement", "requirements-gpu.lock", *options]
    try:
        tried = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index did not answer within {_LIMIT_S:g} s")
    if tried.returncode and any(word in tried.stderr.lower() for word in _NOBODY_ANSWERS):
        pytest.skip(f"the package index does not answer for all packages: {tried.stderr[-500:]}")
    assert tried.returncode == 0, tried.stderr
    assert "Would install" in tried.stderr
