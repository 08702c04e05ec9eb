"""A disk that refuses a checkpoint, or a changed model folder, ends the run with advice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from learner.checkpoint.sealed_files import Report, no_report
from learner.models.read_back import WrittenFiles
from learner.rank.checkpoint import CheckpointWriter
from protocol.errors import OperatorError
from protocol.settings.evaluation import EvalSettings


class _RolesOnABadDisk:
    def check_finite(self) -> None:
        return

    def save_state(self, folder: Path) -> WrittenFiles:
        save_file({"weight": torch.zeros(1)}, folder / "absent" / "state.safetensors")
        return {}


class _Alone:
    def do(self, task: str, work: Callable[[Report], object]) -> None:
        work(no_report)


def test_error_of_safetensors_names_the_checkpoint_and_the_remedy(tmp_path: Path) -> None:
    nobody: Any = None
    writer = CheckpointWriter(
        cast(Any, _RolesOnABadDisk()), nobody, cast(Any, _Alone()), tmp_path, tmp_path, keep=1, evals=EvalSettings()
    )
    with pytest.raises(OperatorError, match=r"step_000003 cannot be written: .*No such file.* Make room, then run"):
        writer.save(3, policy_version=3)


def test_model_whose_files_were_changed_during_the_run_is_not_saved(tmp_path: Path) -> None:
    nobody: Any = None
    model = tmp_path / "model"
    model.mkdir()
    writer = CheckpointWriter(
        cast(Any, _RolesOnABadDisk()), nobody, cast(Any, _Alone()), tmp_path, model, keep=1, evals=EvalSettings()
    )
    (model / "chat_template.jinja").write_text("changed")
    with pytest.raises(OperatorError, match=r"Files in .*model were changed while the run uses them. Put them back"):
        writer.save(3, policy_version=3)
