"""What a state says of who wrote it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.models.policy import PolicyEngine
from learner.models.training import trained_model


def test_state_names_the_zero_stage_that_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Any] = []
    monkeypatch.setattr(trained_model, "save_state", lambda *arguments: written.extend(arguments))
    engine: Any = PolicyEngine.__new__(PolicyEngine)
    engine._settings = SimpleNamespace(zero_stage=0, dtype="bfloat16")
    engine._zero_stage, engine._world_size, engine._shards = 2, 1, None
    engine._model, engine._scheduler = SimpleNamespace(named_parameters=list), SimpleNamespace(last_epoch=3)

    engine.save_state(tmp_path)

    assert [value.zero_stage for value in written if isinstance(value, trained_model.Writer)] == [2]
