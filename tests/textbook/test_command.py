"""The command on a user's model and prompts, for real: transformers samples, DeepSpeed trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_models import make_tiny_model
from tests.textbook.command import main

_ROOT = Path(__file__).parents[2]


@pytest.mark.stack
@pytest.mark.ranks
def test_it_says_in_words_and_figures_that_the_weights_are_the_same(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", tied=True, hidden_size=32, num_layers=1)
    rows = [{"prompt": f"What is {number}?"} for number in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--learner.recipe", "dapo", "--learner.lr", "1e-4"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.textbook", "model", "prompts.jsonl", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert "\nThe weights are the same, bit for bit, after each of 3 steps.\n" in ended.stdout
    assert "Sluice      step 3: the same bits" in ended.stdout
    name, *pairs = ended.stdout.splitlines()[-1].split()
    figures = dict(pair.split("=") for pair in pairs)
    assert (name, figures["recipe"], figures["steps"], figures["holds"]) == ("textbook", "dapo", "3", "yes")
    assert float(figures["moved"]) > 0.0
    assert float(figures["logprobs"]) < 1e-4


def test_wrong_setting_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-model", "no-prompts", "--learner.recipe", "cispo"]) == 2
    assert capsys.readouterr().err.startswith("settings: learner.recipe = cispo has no plain loop.")
