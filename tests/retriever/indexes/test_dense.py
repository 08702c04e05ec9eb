"""Dense searches against slow ones from the formulas, with a real (random) encoder."""

import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, BertModel

from protocol.errors import OperatorError
from retriever.corpus import Corpus
from retriever.index_folder import build_index, content_hash, open_or_build
from retriever.indexes import dense
from retriever.indexes.by_name import IndexOptions, kind_named
from retriever.indexes.encoder import Encoder
from tests.fakes.tiny_encoder import make_tiny_encoder

TEXTS = ["oslo is a capital of norway", "bergen is a town", "turku is a town of finland", "what is a town", "where"]
CORPUS = Corpus([str(i) for i in range(len(TEXTS))], TEXTS, digest="d")
QUERIES = ["where is oslo", "a town", "capital"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    lines = [json.dumps({"id": i, "contents": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path / "corpus.jsonl"


def _slow_vectors(
    folder: Path, texts: list[str], pooling: str = "mean", has_length_1: bool = True
) -> NDArray[np.float32]:
    """Return each text's vector, one text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    vectors = []
    for text in texts:
        with torch.inference_mode():
            hidden = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0].numpy()
        pooled = hidden.mean(0) if pooling == "mean" else hidden[0]
        vectors.append(pooled / np.linalg.norm(pooled) if has_length_1 else pooled)
    return np.array(vectors, np.float32)


@pytest.mark.parametrize(
    ("family", "query_prefix", "passage_prefix", "pooling"),
    [
        ("e5", "query: ", "passage: ", "mean"),
        ("bge", "Represent this sentence for searching relevant passages: ", "", "first"),
        ("dense", "", "", "mean"),
    ],
)
def test_flat_search_is_the_cosine_of_the_encoders_vectors(
    encoder: Path, family: str, query_prefix: str, passage_prefix: str, pooling: str
) -> None:
    index = kind_named(family, IndexOptions(str(encoder))).build(CORPUS)
    queries = _slow_vectors(encoder, [query_prefix + query for query in QUERIES], pooling)
    passages = _slow_vectors(encoder, [passage_prefix + text for text in TEXTS], pooling)
    for found, cosines in zip(index.search(QUERIES, 3), queries @ passages.T, strict=True):
        assert [hit.row for hit in found] == np.argsort(-cosines)[:3].tolist()
        assert [hit.score for hit in found] == pytest.approx(np.sort(cosines)[::-1][:3], abs=1e-5)
    assert [len(hits) for hits in index.search(QUERIES, 100)] == [5, 5, 5]
    assert index.search([], 3) == []


@pytest.mark.parametrize("form", ["flat", "hnsw", "ivf"])
def test_index_of_every_form_is_kept_and_opened(tmp_path: Path, encoder: Path, corpus_file: Path, form: str) -> None:
    options = IndexOptions(str(encoder), form)
    built, _, was_built = open_or_build(tmp_path / "index", corpus_file, "e5", options)
    opened, corpus, was_built_again = open_or_build(tmp_path / "index", corpus_file, "e5", options)
    assert (was_built, was_built_again, list(corpus.contents)) == (True, False, TEXTS)
    assert opened.search(QUERIES, 2) == built.search(QUERIES, 2)
    exact = kind_named("e5", IndexOptions(str(encoder))).build(CORPUS)
    assert [hits[0].row for hits in opened.search(QUERIES, 2)] == [hits[0].row for hits in exact.search(QUERIES, 2)]
    assert [path.name for path in tmp_path.glob(".index*")] == [".index.lock"]


def test_interrupted_build_resumes(
    tmp_path: Path, encoder: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "_PART", 2)
    encoded: list[str] = []

    class Interrupted(Encoder):
        def passages(self, texts):  # type: ignore[no-untyped-def]  # as the class it stands for
            if len(encoded) == 4:
                raise KeyboardInterrupt
            encoded.extend(texts)
            return super().passages(texts)

    with pytest.raises(KeyboardInterrupt):
        build_index(tmp_path / "index", corpus_file, "e5", dense.DenseKind(Interrupted(str(encoder), "e5"), "flat"))
    monkeypatch.setattr(
        Encoder, "passages", lambda self, texts, real=Encoder.passages: real(self, encoded.extend(texts) or texts)
    )
    index, _ = build_index(tmp_path / "index", corpus_file, "e5", kind_named("e5", IndexOptions(str(encoder))))
    assert encoded == TEXTS
    assert index.search(QUERIES, 5) == kind_named("e5", IndexOptions(str(encoder))).build(CORPUS).search(QUERIES, 5)
    assert [path.name for path in tmp_path.glob(".index*")] == [".index.lock"]


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,Flat", "IVF1,Flat"])
def test_users_faiss_file_is_read_as_it_is(tmp_path: Path, encoder: Path, corpus_file: Path, factory: str) -> None:
    vectors = _slow_vectors(encoder, ["passage: " + text for text in TEXTS])
    theirs = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    theirs.train(vectors)
    theirs.add(vectors)
    file = tmp_path / "e5.index"
    faiss.write_index(theirs, str(file))
    options = IndexOptions(str(encoder), faiss_file=file)
    folder = tmp_path / "e5.index.documents"
    for was_built in (True, False):
        index, _, is_new = open_or_build(folder, corpus_file, "e5", options)
        assert is_new is was_built
        cosines = _slow_vectors(encoder, ["query: " + query for query in QUERIES]) @ vectors.T
        assert [hits[0].row for hits in index.search(QUERIES, 1)] == cosines.argmax(1).tolist()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".npy", ".npy", ".utf8", ".utf8"]


@pytest.mark.parametrize("factory", ["Flat", "IVF1,Flat"])
@pytest.mark.parametrize("has_length_1", [False, True])
def test_distances_of_a_users_file_are_from_queries_of_its_vectors_length(
    tmp_path: Path, encoder: Path, corpus_file: Path, factory: str, has_length_1: bool
) -> None:
    """As index.add(model.encode(texts)) of a tutorial makes it, with an encoder that does not normalise."""
    vectors, asked = (_slow_vectors(encoder, texts, has_length_1=has_length_1) for texts in (TEXTS, QUERIES))
    theirs = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_L2)
    theirs.train(vectors)
    theirs.add(vectors)
    faiss.write_index(theirs, str(tmp_path / "l2.index"))
    options = IndexOptions(str(encoder), faiss_file=tmp_path / "l2.index")
    index, _, _ = open_or_build(tmp_path / "documents", corpus_file, "dense", options)
    distances = ((asked[:, None] - vectors[None]) ** 2).sum(-1)
    found = index.search(QUERIES, 5)
    assert [[hit.row for hit in hits] for hits in found] == np.argsort(distances).tolist()
    if factory == "Flat" or not has_length_1:
        assert [[hit.score for hit in hits] for hits in found] == [
            pytest.approx(row, abs=1e-3) for row in np.sort(distances).tolist()
        ]


def test_faiss_file_of_another_corpus_or_encoder_is_refused(tmp_path: Path, encoder: Path, corpus_file: Path) -> None:
    file = tmp_path / "e5.index"
    options = IndexOptions(str(encoder), faiss_file=file)
    for dimension, message in ((32, "holds 1 vectors, and the corpus 5 documents"), (8, "vectors of 8 numbers")):
        theirs = faiss.IndexFlatIP(dimension)
        theirs.add(np.ones((1, dimension), np.float32))
        faiss.write_index(theirs, str(file))
        with pytest.raises(OperatorError, match=message):
            open_or_build(tmp_path / "documents", corpus_file, "e5", options)
    file.write_bytes(b"no index")
    with pytest.raises(OperatorError, match="Give a FAISS index file"):
        open_or_build(tmp_path / "documents", corpus_file, "e5", options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("e5", IndexOptions(), "--retriever-name e5 needs --retriever-model"),
        ("e5", IndexOptions("/nowhere"), "--retriever-model /nowhere cannot be loaded"),
        ("vibes", IndexOptions(), "--retriever-name vibes is not known. Choose one of: bm25, e5, bge, dense"),
    ],
)
def test_kind_that_cannot_be_made_is_refused(name: str, options: IndexOptions, message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        kind_named(name, options)


def test_form_that_is_none_is_refused(encoder: Path) -> None:
    with pytest.raises(OperatorError, match=r"--faiss vibes is not known\. Choose one of: flat, hnsw, ivf"):
        kind_named("e5", IndexOptions(str(encoder), "vibes"))


def test_content_hash_tells_indexes_that_answer_otherwise(tmp_path: Path, encoder: Path, corpus_file: Path) -> None:
    hashes = []
    for name, form in (("bm25", "flat"), ("e5", "flat"), ("e5", "hnsw"), ("bm25", "flat")):
        folder = tmp_path / f"index{len(hashes)}"
        open_or_build(folder, corpus_file, name, IndexOptions(str(encoder), form))
        hashes.append(content_hash(folder))
    assert hashes[0] == hashes[3]
    assert len(set(hashes)) == 3


def test_content_hash_of_a_users_file_is_that_of_its_content_and_encoder(
    tmp_path: Path, encoder: Path, corpus_file: Path
) -> None:
    vectors = _slow_vectors(encoder, TEXTS)
    theirs = faiss.IndexFlatIP(vectors.shape[1])
    theirs.add(vectors)
    hashes = []
    for folder, model in (("one", encoder), ("copy", tmp_path / "copied"), ("other", tmp_path / "different")):
        (tmp_path / folder).mkdir()
        faiss.write_index(theirs, str(tmp_path / folder / "e5.index"))
        if model is not encoder:
            shutil.copytree(encoder, model)
        if folder == "other":
            BertModel.from_pretrained(encoder, hidden_dropout_prob=0.2).save_pretrained(model)
        options = IndexOptions(str(model), faiss_file=tmp_path / folder / "e5.index")
        open_or_build(tmp_path / folder / "documents", corpus_file, "e5", options)
        hashes.append(content_hash(tmp_path / folder / "documents"))
    assert hashes[0] == hashes[1] != hashes[2]


def test_index_is_built_again_for_another_encoder_in_the_same_folder(
    tmp_path: Path, encoder: Path, corpus_file: Path
) -> None:
    options = IndexOptions(str(shutil.copytree(encoder, tmp_path / "encoder")))
    for seed, was_built in ((0, True), (0, False), (1, True)):
        if seed:
            torch.manual_seed(seed)
            BertModel(BertModel.from_pretrained(encoder).config).save_pretrained(tmp_path / "encoder")
        assert open_or_build(tmp_path / "index", corpus_file, "e5", options)[2] is was_built
