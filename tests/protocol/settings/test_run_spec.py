"""Which engines can serve which runs: the fingerprint of an engine's settings and its model's small files."""

from pathlib import Path
from typing import Any

import pytest

from protocol.settings.run_spec import EngineRequest, engine_request
from protocol.settings.settings import Settings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 128}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def _request(model: Path, **settings: Any) -> EngineRequest:
    return engine_request(Settings.model_validate(settings), model, "gloo")


def test_request_carries_the_small_files_and_their_digest_without_weights(model: Path) -> None:
    request = _request(model)
    assert set(request.files) == {"config.json", "tokenizer.json"}
    assert request.without_files().files == {}
    assert request.without_files().fingerprint() == request.fingerprint()
    assert EngineRequest.model_validate(request.model_dump()) == request


def test_fingerprint_is_the_same_for_another_folder_and_other_weights(model: Path, tmp_path: Path) -> None:
    before = _request(model).fingerprint()
    (model / "model.safetensors").write_bytes(b"other weights")
    assert _request(model.rename(tmp_path / "elsewhere")).fingerprint() == before


def test_fingerprint_changes_with_the_tokenizer(model: Path) -> None:
    before = _request(model).fingerprint()
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    assert _request(model).fingerprint() != before


@pytest.mark.parametrize(
    "change",
    [
        {"policy": {"dtype": "float32"}},
        {"rollout": {"max_context_tokens": 1024}},
        {"rollout": {"engine_args": {"max_num_seqs": 32}}},
    ],
    ids=["dtype", "max_model_len", "engine_args"],
)
def test_fingerprint_changes_with_a_setting(model: Path, change: dict[str, Any]) -> None:
    assert _request(model, **change).fingerprint() != _request(model).fingerprint()
