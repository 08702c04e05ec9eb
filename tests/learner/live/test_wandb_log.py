"""Weights & Biases for real, offline; and what a run notices when it fails: one warning."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from learner.live import wandb_log

_RECORD = """
import sys, time
from pathlib import Path
from learner.live.wandb_log import WandbLog

log = WandbLog("sluice-test", "a-run", {"learner": {"lr": 0.5}}, Path(sys.argv[1]))
for step in range(3):
    log.log({"step": step, "reward_mean": step / 2, "at_s": time.time()})
log.log({"step": 3, "of_a_known_step": 1, "at_s": 1.0})
log.log({"step": 4, "of_a_line_that_was_held_back": 1, "at_s": 1.0})
log.log({"step": 5, "eval/step": 4, "eval/held_out/reward": 1.0, "at_s": time.time()})
log.close()
print(log.where)
"""


def _record(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Log three steps in a process of its own: wandb leaves threads and a service behind until its process ends."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "WANDB_CONFIG_DIR": str(folder / "config"), **environment}
    command = [sys.executable, "-c", _RECORD, str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_wandb_log_writes_an_offline_run_with_answers_that_a_second_start_goes_on_with(tmp_path: Path) -> None:
    answer = {"step": 4, "uid": "q", "reward": 1.0, "prompt": "Who?", "label": "me", "response": "I", "is_greedy": True}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(answer))
    first = _record(tmp_path, WANDB_MODE="offline")
    run_id = (tmp_path / "wandb_run_id").read_text()
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    second = _record(tmp_path, WANDB_MODE="offline")
    assert (first.returncode, first.stderr, second.returncode) == (0, "", 0)
    assert (tmp_path / "wandb_run_id").read_text() == run_id
    files = list(tmp_path.glob(f"wandb/offline-run-*/run-{run_id.strip()}.wandb"))
    assert files
    assert second.stdout == (
        f"Weights & Biases page, kept here; send it with: wandb sync {max(tmp_path.glob('wandb/offline-run-*'))}\n"
    )
    assert b"reward_mean" in files[0].read_bytes()
    table = json.loads(next(tmp_path.glob("wandb/offline-run-*/files/media/table/eval/*.json")).read_text())
    assert table["data"] == [[4, "Who?", "me", "I", 1.0, True]]
    newest = max(files).read_bytes()
    assert b"of_a_line_that_was_held_back" in newest
    assert b"of_a_known_step" not in newest
    assert b'eval/held_out/reward"\teval/step' in newest  # the metric, and the one that it is drawn over


def test_wandb_log_warns_once_and_ends_when_there_is_no_key(tmp_path: Path) -> None:
    ended = _record(tmp_path)
    assert ended.returncode == 0
    assert ended.stderr.count("wandb failed") == 1
    assert "no API key. Set WANDB_API_KEY, or WANDB_MODE=offline" in ended.stderr


def test_wandb_is_imported_only_when_asked_for() -> None:
    code = "import learner.live.wandb_log, sys; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


def test_close_of_a_full_queue_waits_no_longer_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_log, "_MAX_WAITING", 1)
    slow = [1.0, 5.0]  # seconds before the queue has room, and after
    monkeypatch.setattr(wandb_log.WandbLog, "_send_all", lambda log: [(time.sleep(s), log._lines.get()) for s in slow])
    log = wandb_log.WandbLog("sluice-test", "a-run", {}, tmp_path)
    log.log({"step": 0})
    began = time.monotonic()
    log.close(1.5)
    assert time.monotonic() - began < 2.2  # a full limit for the queue and one for the thread would be 2.5
