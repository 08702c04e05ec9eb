"""An index on disk: reused when it fits, built again when not, never half written."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.errors import OperatorError
from retriever.corpus import digest_of
from retriever.index_folder import MANIFEST, build_index, open_index, open_or_build
from retriever.indexes.bm25 import Bm25Index
from retriever.indexes.by_name import INDEXES

ONE = '{"id": "1", "contents": "\\"Oslo\\"\\nOslo is a capital."}\n{"id": "2", "contents": "Bergen is a town."}\n'


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "corpus.jsonl"
    path.parent.mkdir()
    path.write_text(ONE)
    return path


def test_open_or_build_builds_once(tmp_path: Path, corpus: Path) -> None:
    assert open_or_build(tmp_path / "deep" / "index", corpus, "bm25")[2] is True
    index, documents, was_built = open_or_build(tmp_path / "deep" / "index", corpus, "bm25")
    assert was_built is False
    ((hit,),) = index.search(["bergen"], 1)
    assert (documents.ids[hit.row], documents.contents[hit.row]) == ("2", "Bergen is a town.")


def test_open_or_build_builds_again_for_another_corpus(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "indexes" / "index"
    _, before = build_index(folder, corpus, "bm25")
    corpus.write_text('{"id": "3", "contents": "Turku"}\n')
    index, documents, was_built = open_or_build(folder, corpus, "bm25")
    assert was_built is True
    assert index.search(["turku"], 1)[0][0].row == 0
    assert sorted(os.listdir(folder.parent)) == [".index.lock", "index"]
    assert (list(documents.ids), list(before.ids)) == (["3"], ["1", "2"])  # who has the old one open reads on


def test_open_or_build_builds_again_by_another_recipe(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(tmp_path / "index", corpus, "bm25")
    for name, recipe in (("k1", {**Bm25Index.recipe(), "k1": 0.9}), ("more", {**Bm25Index.recipe(), "more": 1})):
        other = type("Other", (Bm25Index,), {"recipe": classmethod(lambda cls, recipe=recipe: recipe)})
        monkeypatch.setitem(INDEXES, "bm25", lambda options, kind=other: kind)
        assert open_index(tmp_path / "index", digest_of(corpus), "bm25") is None, name


def test_manifest_says_what_decides_an_index(tmp_path: Path, corpus: Path) -> None:
    build_index(tmp_path / "index", corpus, "bm25")
    manifest = json.loads((tmp_path / "index" / MANIFEST).read_text())
    assert (manifest["num_documents"], manifest["recipe"]) == (
        2,
        {
            "schema_version": 2,
            "backend": "bm25",
            "corpus_digest": digest_of(corpus),
            "words": "nfkd-lower-alphanumeric-3",
            "k1": 1.2,
            "b": 0.5,
            "title_weight": 3,
        },
    )
    assert set(manifest["files"]) >= {"ids.utf8", "ids.ends.npy", "contents.utf8", "contents.ends.npy"}


@pytest.mark.parametrize("name", ["data.csc.index.npy", "contents.utf8", "ids.ends.npy"])
def test_open_index_refuses_a_damaged_file(tmp_path: Path, corpus: Path, name: str) -> None:
    build_index(tmp_path / "index", corpus, "bm25")
    data = tmp_path / "index" / name
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")
    assert open_index(tmp_path / "index", digest_of(corpus), "bm25") is None


def test_open_index_refuses_a_folder_without_its_manifest(tmp_path: Path, corpus: Path) -> None:
    build_index(tmp_path / "index", corpus, "bm25")
    (tmp_path / "index" / MANIFEST).unlink()
    assert open_index(tmp_path / "index", digest_of(corpus), "bm25") is None


def test_build_does_not_change_a_folder_with_other_files(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(OperatorError, match="holds files that are not an index of this service"):
        build_index(tmp_path, corpus, "bm25")
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_build_of_an_invalid_corpus_leaves_no_index(tmp_path: Path, corpus: Path) -> None:
    corpus.write_text("[]\n")
    with pytest.raises(OperatorError, match="line 1 of"):
        build_index(tmp_path / "indexes" / "index", corpus, "bm25")
    assert os.listdir(tmp_path / "indexes") == [".index.lock"]


def test_concurrent_builds_leave_one_index(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "indexes" / "index"
    with ThreadPoolExecutor(4) as threads:
        for built in [threads.submit(build_index, folder, corpus, "bm25") for _ in range(12)]:
            built.result()
    assert open_index(folder, digest_of(corpus), "bm25") is not None
    assert sorted(os.listdir(folder.parent)) == [".index.lock", "index"]


def test_build_removes_the_folders_of_killed_builders(tmp_path: Path, corpus: Path) -> None:
    for name in (".index.building", ".index.old", ".index.mine", "index2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    build_index(tmp_path / "index", corpus, "bm25")
    assert sorted(os.listdir(tmp_path)) == [".index.lock", ".index.mine", "index", "index2", "source"]


def test_build_follows_a_link(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "index").symlink_to(tmp_path / "disk" / "index")
    for was_built in (True, False):
        assert open_or_build(tmp_path / "index", corpus, "bm25")[2] is was_built
    assert (tmp_path / "index").is_symlink()
    assert sorted(os.listdir(tmp_path / "disk")) == [".index.lock", "index"]
