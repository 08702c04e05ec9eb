"""A run whose accounts hold, made once, and a copy of it for a test that breaks it."""

import shutil
from pathlib import Path

import pytest

from tests.learner.audit.audited_run import make_run
from tests.learner.audit.broken_run import Good


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("audit") / "run1"
    return folder, make_run(folder)


@pytest.fixture
def run(good: Good, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good[0], tmp_path / "run1", symlinks=True))
