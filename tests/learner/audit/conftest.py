"""A run whose accounts hold, made once: a test that breaks it copies it."""

import pytest

from tests.learner.audit.audited_run import make_run
from tests.learner.audit.broken_run import Good


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("rules") / "run1"
    groups = make_run(folder)
    return folder, groups
