"""A scripted coordinator of a run that has just begun, for the tests of this room."""

from pathlib import Path

import pytest

from tests.learner.coordinator.coordinator_script import Script


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)
