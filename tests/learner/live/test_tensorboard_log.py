"""Event files as TensorBoard's own reader reads them, and a missing package."""

import subprocess
import sys
from pathlib import Path

import pytest

from learner.live.tensorboard_log import TensorboardLog


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_each_step_once_though_a_resume_repeated_it(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for loss, steps in ((0.5, (1, 2, 3)), (0.25, (2, 3))):
        log = TensorboardLog(tmp_path)
        log.log({"step": 1, "policy/loss": 9.0, "at_s": 1.0})  # an earlier start's
        for step in steps:
            log.log({"step": step, "policy/loss": loss})
        log.close()
    log = TensorboardLog(tmp_path)
    log.log({"step": 9, "eval/step": 4, "eval/held_out/reward": 0.5})  # the evaluation ran beside the steps
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("policy/loss")] == [(1, 0.5), (2, 0.25), (3, 0.25)]
    assert [(each.step, each.value) for each in events.Scalars("eval/held_out/reward")] == [(4, 0.5)]


def test_missing_package_is_refused_with_the_command_that_installs_it() -> None:
    code = (
        "import sys\nsys.modules['tensorboard'] = None\nimport learner.live.tensorboard_log as log\nlog.import_writer()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert ended.stderr.splitlines()[-1].endswith(
        "Install it with pip install tensorboard, or set report.tensorboard to false."
    )
