"""The unmodified tinker client against the service. SLUICE_TINKER_PYTHON names a Python that has it (and torch)."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_models import make_tiny_model

PYTHON = os.environ.get("SLUICE_TINKER_PYTHON")
KEY = "tml-0123456789abcdef"
pytestmark = [
    pytest.mark.stack,
    pytest.mark.ranks,
    pytest.mark.skipif(PYTHON is None, reason="SLUICE_TINKER_PYTHON names no Python with the tinker client"),
]


@contextmanager
def service(model: Path, folder: Path, *options: str) -> Iterator[str]:
    """Yield the address of a service."""
    command = [sys.executable, "-c", "from deploy.command import main; raise SystemExit(main())", "tinker", str(model)]
    with (folder / "service.log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--folder", str(folder / "state"), "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, (folder / "service.log").read_text()
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def run_client(address: str, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    assert PYTHON is not None
    settings = {"TINKER_BASE_URL": address, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}
    script = Path(__file__).with_name("client_script.py")
    command = [PYTHON, str(script), *arguments]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the script got."""
    folder = tmp_path_factory.mktemp("tinker")
    model = make_tiny_model(folder / "model", tied=False)
    (folder / "key").write_text(KEY)
    with service(model, folder, "--name", "tiny", "--key-file", str(folder / "key")) as address:
        refused = run_client(address, "tiny", key="tml-another-key-here")
        assert "X-API-Key is not the key" in refused.stderr
        done = run_client(address, "tiny")
    assert done.returncode == 0, done.stderr + (folder / "service.log").read_text()
    read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return read


def far(one: list[list[float]], other: list[list[float]]) -> float:
    """Return the largest difference of two tables."""
    pairs = zip(one, other, strict=True)
    return max(abs(a - b) for row, same in pairs for a, b in zip(row, same, strict=True))


def test_training_lowers_the_loss(found: dict[str, Any]) -> None:
    assert found["rank"] == 8
    assert found["losses"][3] < 0.5 * found["losses"][0]


def test_vllm_and_the_learner_agree_on_logprobs(found: dict[str, Any]) -> None:
    assert found["lengths"] == [6, 6]
    assert far(found["prompt_logprobs"], found["forward"]) < 1e-4
    assert far([found["sampled"]], [found["learnt"]]) < 1e-4


def test_a_saved_state_has_the_weights_and_its_own_loss_is_the_clients(found: dict[str, Any]) -> None:
    assert found["loaded"] == found["forward"]
    assert found["custom"] == pytest.approx(-sum(map(sum, found["forward"])), abs=1e-3)


def test_a_run_and_its_saved_weights_are_described_and_deleted(found: dict[str, Any]) -> None:
    assert found["described"][:5] == ["tiny", 8, {"of": "script"}, 8, False]
    assert "has no saved weights here" in found["described"][5]


def test_losses_of_samples_are_served_and_the_unpublished_one_is_refused(found: dict[str, Any]) -> None:
    assert set(found["rl_losses"]) == {"importance_sampling", "ppo", "cispo", "dro"}
    assert abs(found["rl_losses"]["ppo"]) < 1e-3  # ratios of 1, and advantages whose sum is 0
    assert "its formula is not published" in found["refusal"]


def test_samples_name_their_weights(found: dict[str, Any]) -> None:
    of_session, of_name, of_base = found["writers"]

    assert re.match(r"tinker://\w+:train:0/sampler_weights/request-\d+@4/", of_session)
    assert re.match(r"tinker://\w+:train:0/sampler_weights/named@5/", of_name)
    assert re.match(r"tiny@0/", of_base)
