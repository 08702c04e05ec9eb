"""A tiny base model for the tests of this room."""

from pathlib import Path

import pytest

from deploy.tinker.adapters import BaseModel
from tests.deploy.tinker.played_client import base_model
from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tied=True, hidden_size=32, num_layers=1)


@pytest.fixture(scope="session")
def base(model_folder: Path) -> BaseModel:
    return base_model(model_folder)
