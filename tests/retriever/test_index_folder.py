"""An index on disk: reused when it fits, built again when not, never half written."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.errors import OperatorError
from retriever.corpus import Corpus
from retriever.index_folder import MANIFEST, build_index, open_index, open_or_build

CORPUS = Corpus(["1", "2"], ['"Oslo"\nOslo is a capital.', '"Bergen"\nBergen is a town.'], digest="one")


def test_open_or_build_builds_once(tmp_path: Path) -> None:
    assert open_or_build(tmp_path / "deep" / "index", CORPUS)[1] is True
    index, was_built = open_or_build(tmp_path / "deep" / "index", CORPUS)
    assert was_built is False
    assert index.search("bergen", 1)[0].row == 1


def test_open_or_build_builds_again_for_another_corpus(tmp_path: Path) -> None:
    build_index(tmp_path / "index", CORPUS)
    index, was_built = open_or_build(tmp_path / "index", Corpus(["1"], ["Turku"], digest="two"))
    assert was_built is True
    assert index.search("turku", 1)[0].row == 0
    assert os.listdir(tmp_path) == ["index"]


def test_open_index_refuses_a_damaged_file(tmp_path: Path) -> None:
    build_index(tmp_path / "index", CORPUS)
    data = tmp_path / "index" / "data.csc.index.npy"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert open_index(tmp_path / "index", CORPUS) is None


def test_open_index_refuses_a_folder_without_its_manifest(tmp_path: Path) -> None:
    build_index(tmp_path / "index", CORPUS)
    (tmp_path / "index" / MANIFEST).unlink()
    assert open_index(tmp_path / "index", CORPUS) is None


def test_build_leaves_a_strange_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(OperatorError, match="holds something that is not an index of this service"):
        build_index(tmp_path, CORPUS)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_build_by_several_at_once_leaves_one_whole_index(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        for built in [threads.submit(build_index, tmp_path / "index", CORPUS) for _ in range(12)]:
            built.result()
    assert open_index(tmp_path / "index", CORPUS) is not None
    assert os.listdir(tmp_path) == ["index"]
