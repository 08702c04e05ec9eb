"""A folder with one recorded run, and a page over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.learner.report.dash.page import Page, make_runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_runs(tmp_path)


@pytest.fixture
def page(folder: Path, tmp_path: Path) -> Iterator[Page]:
    made = Page(folder, tmp_path / "indexes")
    made.index()
    yield made
    made.client.close()
