"""Dense searches of many queries at once: the same as of each alone, equal documents in corpus order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from retriever.indexes.dense import DenseIndex
from retriever.indexes.encoder import Encoder
from tests.fakes.tiny_encoder import make_tiny_encoder

_DIMENSION, _NUM_DIFFERENT, _COPIES = 384, 211, 5


class NamedVectors:
    """An encoder whose queries are numbers of vectors that it was given."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self._vectors = vectors

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._vectors[[int(text) for text in texts]]


def _unit(vectors: NDArray[Any]) -> NDArray[np.float32]:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("num_queries", [1, 3, 4, 64])
def test_equal_documents_are_found_in_corpus_order_whatever_is_searched_with_them(num_queries: int) -> None:
    chance = np.random.default_rng(0)
    # Every vector stands in the corpus five times, and the copies are far from each other.
    documents = np.tile(_unit(chance.standard_normal((_NUM_DIFFERENT, _DIMENSION))), (_COPIES, 1))
    asked = _unit(chance.standard_normal((num_queries, _DIMENSION)))
    vectors = faiss.IndexFlatIP(_DIMENSION)
    vectors.add(documents)
    found = DenseIndex(NamedVectors(asked), vectors).search([str(i) for i in range(num_queries)], 7)  # type: ignore[arg-type]
    for query, hits in zip(asked.astype(np.float64), found, strict=True):
        once = documents[:_NUM_DIFFERENT].astype(np.float64) @ query
        best, second = np.argsort(-once)[:2]
        in_order = [best + _NUM_DIFFERENT * copy for copy in range(_COPIES)]
        assert [hit.row for hit in hits] == [*in_order, second, second + _NUM_DIFFERENT]
        assert {hit.score for hit in hits[:_COPIES]} == {np.float32(once[best])}


def test_fewer_documents_than_asked_for_are_all_found() -> None:
    documents = _unit(np.eye(3, _DIMENSION))
    vectors = faiss.IndexFlatIP(_DIMENSION)
    vectors.add(documents)
    found = DenseIndex(NamedVectors(documents), vectors).search(["2", "1"], 9)  # type: ignore[arg-type]
    assert [[hit.row for hit in hits] for hits in found] == [[2, 0, 1], [1, 0, 2]]


def test_texts_of_many_lengths_are_encoded_as_alone_with_little_padding(tmp_path: Path) -> None:
    encoder = Encoder(str(make_tiny_encoder(tmp_path)), "e5")
    texts = ["oslo is a town " * (1 + 7 * number % 20) for number in range(100)]
    alone = np.concatenate([encoder.queries([text]) for text in texts])
    passes: list[tuple[int, int]] = []

    def note(_: torch.nn.Module, __: Any, given: dict[str, torch.Tensor]) -> None:
        passes.append((int(given["input_ids"].numel()), int(given["attention_mask"].sum())))

    encoder._model.register_forward_pre_hook(note, with_kwargs=True)
    np.testing.assert_allclose(encoder.queries(texts), alone, atol=1e-6)
    padded, read = (sum(column) for column in zip(*passes, strict=True))
    assert padded < 1.15 * read
