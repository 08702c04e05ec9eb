"""Dense indexes over the vectors of an encoder, with FAISS: flat (exact), hnsw or ivf (approximate).

A corpus is encoded in parts. Each part's vectors are saved until the index is complete: an interrupted build resumes.
Memory holds one part and the index. A user's own FAISS file is read as it is and never written.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from protocol.disk.files import model_identity, replacing
from protocol.errors import OperatorError
from retriever.corpus import Corpus
from retriever.indexes.encoder import Encoder
from retriever.indexes.index import Hit

_log = logging.getLogger(__name__)
_FILE = "faiss.index"
_PART = 4096
_TRAINING_VECTORS = 200_000
_PROGRESS_S = 10.0
# Search breadth of approximate indexes: larger values find more and take longer.
_HNSW_LINKS, _HNSW_BUILD, _HNSW_SEARCH, _IVF_PROBES = 32, 200, 128, 16
FORMS = ("flat", "hnsw", "ivf")
# Extra candidates of a flat search, see `_in_exact_order`.
_SPARE = 16
_SAMPLES, _SAMPLE_BYTES = 1024, 64 << 10
_JUDGED = 16  # vectors of a user's index
# From this number of queries on, a flat search is one matrix product. FAISS's own default is a larger threshold.
# Measured with 50,000 vectors of 384 numbers: 64 queries take 0.6 ms each instead of 5 ms.
faiss.cvar.distance_compute_blas_threshold = 4


class DenseIndex:
    """An index of vectors; threads may share it."""

    def __init__(self, encoder: Encoder, vectors: Any) -> None:
        """vectors: FAISS index; its i-th vector belongs to the i-th document."""
        self._vectors = vectors
        self._queries = encoder.queries
        is_flat = isinstance(faiss.downcast_index(vectors), faiss.IndexFlat)
        self._is_exact = is_flat and vectors.metric_type == faiss.METRIC_INNER_PRODUCT

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query the topk nearest documents; the score is the cosine, or the metric of the user's index.

        A flat index returns equal scores in corpus order, independent of the other queries in the batch.
        """
        if not queries:
            return []
        query_vectors = self._queries(queries)
        if self._is_exact:
            _, rows = self._vectors.search(query_vectors, min(topk + _SPARE, self._vectors.ntotal))
            scores, rows = _in_exact_order(query_vectors, rows, self._vectors, topk)
        else:
            scores, rows = self._vectors.search(query_vectors, min(topk, self._vectors.ntotal))
        return [
            [Hit(row, score) for row, score in zip(*pair, strict=True) if row >= 0]  # -1: no further hit
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def save(self, folder: Path) -> None:
        faiss.write_index(self._vectors, str(folder / _FILE))


class DenseKind:
    """Makes dense indexes with one encoder."""

    def __init__(self, encoder: Encoder, form: str) -> None:
        if form not in FORMS:
            raise OperatorError(f"retriever: --faiss {form} is not known. Choose one of: {', '.join(FORMS)}.")
        self._encoder = encoder
        self._form = form

    def recipe(self) -> Mapping[str, str | int | float]:
        return {"encoder": model_identity(self._encoder.name), "family": self._encoder.family, "faiss": self._form}

    def build(self, corpus: Corpus, scratch: Path | None = None) -> DenseIndex:
        """Return the index; blocks while it encodes. Progress is logged, finished parts are kept in scratch."""
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        index = self._empty(len(corpus))
        if not index.is_trained:
            index.train(self._training_vectors(corpus, scratch))
        started = logged = time.monotonic()
        for start in range(0, len(corpus), _PART):
            index.add(self._part(corpus, start, scratch))
            if time.monotonic() - logged > _PROGRESS_S:
                logged = time.monotonic()
                left_s = (logged - started) / index.ntotal * (len(corpus) - index.ntotal)
                _log.warning("encoded %d of %d documents  left_s=%.0f", index.ntotal, len(corpus), left_s)
        return DenseIndex(self._encoder, index)

    def load(self, folder: Path) -> DenseIndex:
        return DenseIndex(self._encoder, read_faiss(folder / _FILE, self._encoder))

    def _empty(self, num_documents: int) -> Any:
        dimension, metric = self._encoder.dimension, faiss.METRIC_INNER_PRODUCT
        if self._form == "hnsw":
            index = faiss.IndexHNSWFlat(dimension, _HNSW_LINKS, metric)
            index.hnsw.efConstruction, index.hnsw.efSearch = _HNSW_BUILD, _HNSW_SEARCH
            return index
        if self._form == "ivf":
            # FAISS needs at least 39 training vectors per list.
            num_lists = max(1, min(round(4 * math.sqrt(num_documents)), num_documents // 39))
            lists = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimension), dimension, num_lists, metric)
            lists.nprobe = min(num_lists, _IVF_PROBES)
            return lists
        return faiss.IndexFlatIP(dimension)

    def _training_vectors(self, corpus: Corpus, scratch: Path | None) -> NDArray[np.float32]:
        starts = range(0, min(len(corpus), _TRAINING_VECTORS), _PART)
        return np.concatenate([self._part(corpus, start, scratch) for start in starts])

    def _part(self, corpus: Corpus, start: int, scratch: Path | None) -> NDArray[np.float32]:
        """Return the vectors of the documents from `start`; read from scratch if they are there."""
        file = scratch / f"{start}.npy" if scratch is not None else None
        if file is not None and file.exists():
            vectors: NDArray[np.float32] = np.load(file, allow_pickle=False)
            return vectors
        vectors = self._encoder.passages(corpus.contents[start : start + _PART])
        if file is not None:
            with replacing(file) as aside:
                np.save(aside, vectors)
        return vectors


def _in_exact_order(
    queries: NDArray[np.float32], rows: NDArray[np.int64], vectors: Any, topk: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the scores and rows of the topk best, best first, equal scores in corpus order.

    queries: [N, D]; rows: [N, K], the candidates. Returns two arrays [N, min(topk, K)].
    A matrix product sums in an order that depends on its size. Its scores of equal documents would differ by batch.
    """
    num, found = rows.shape
    documents = vectors.reconstruct_batch(rows.ravel()).reshape(num, found, -1).astype(np.float64)  # [N, K, D]
    scores = (documents * queries[:, None]).sum(-1).astype(np.float32)  # [N, K]
    best = np.lexsort((rows, -scores))[:, :topk]
    return np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)


def read_faiss(file: Path, encoder: Encoder) -> Any:
    """Return the FAISS index in a file, memory-mapped where its type allows it.

    Raises: OSError for another kind of file, OperatorError if vectors and encoder differ in size.
    """
    if not file.is_file():
        raise FileNotFoundError(2, "no such file", str(file))
    try:
        index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP)
    except RuntimeError as error:
        raise OSError(5, f"no FAISS index: {str(error)[:200]}", str(file)) from None
    if index.d != encoder.dimension:
        raise OperatorError(
            f"retriever: {file} holds vectors of {index.d} numbers, and {encoder.name} makes {encoder.dimension}. "
            "Set --retriever-model to the encoder of the index."
        )
    return index


def _has_length_1(vectors: Any) -> bool:
    """Return whether an index is known to hold vectors of length 1, judged by its first ones."""
    try:
        lengths = [np.linalg.norm(vectors.reconstruct(row)) for row in range(min(_JUDGED, vectors.ntotal))]
    except RuntimeError:  # its form keeps no single vectors
        return False
    return bool(np.allclose(lengths, 1.0, atol=1e-2))


def sampled_digest(file: Path) -> str:
    """Return a digest of a file's size and of 1,024 parts of it: a whole file may have tens of gigabytes."""
    size = file.stat().st_size
    digest = blake3(size.to_bytes(8, "little"))
    with file.open("rb") as opened:
        for number in range(_SAMPLES):
            opened.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


class FaissFileKind:
    """Opens a user's FAISS file; its i-th vector belongs to the i-th document."""

    def __init__(self, encoder: Encoder, file: Path) -> None:
        self._encoder = encoder
        self._file = file

    def recipe(self) -> Mapping[str, str | int | float]:
        encoder, identity = self._encoder, model_identity(self._encoder.name)
        return {"faiss_file": sampled_digest(self._file), "encoder": identity, "family": encoder.family}

    def build(self, corpus: Corpus, scratch: Path | None = None) -> "_UsersIndex":
        """Return the user's index. Raises: OperatorError for another kind of file, or another corpus."""
        try:
            vectors = read_faiss(self._file, self._encoder)
        except OSError as error:
            raise OperatorError(
                f"retriever: --index-path {self._file} cannot be read ({error.strerror}). "
                "Give a FAISS index file, or the folder of an index."
            ) from None
        if vectors.ntotal != len(corpus):
            raise OperatorError(
                f"retriever: {self._file} holds {vectors.ntotal} vectors, and the corpus {len(corpus)} documents. "
                "Set --corpus-path to the corpus of the index."
            )
        return _UsersIndex(self._encoder, vectors)

    def load(self, folder: Path) -> "_UsersIndex":
        return _UsersIndex(self._encoder, read_faiss(self._file, self._encoder))


class _UsersIndex(DenseIndex):
    def __init__(self, encoder: Encoder, vectors: Any) -> None:
        super().__init__(encoder, vectors)
        # Distances from vectors of any length are of queries as the model makes them.
        if vectors.metric_type == faiss.METRIC_L2 and not _has_length_1(vectors):
            self._queries = encoder.unscaled_queries

    def save(self, folder: Path) -> None:
        """Write nothing: the user's file stays in place."""
