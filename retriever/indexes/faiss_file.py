"""A FAISS index file that the user has, of any form: flat, HNSW or IVF. It is read as it is and never written."""

from collections.abc import Mapping
from pathlib import Path

from protocol.errors import OperatorError
from retriever.corpus import Corpus
from retriever.indexes.dense import DenseIndex, read_faiss
from retriever.indexes.encoder import Encoder


class FaissFileKind:
    """Opens one file; its i-th vector is the i-th document of the corpus."""

    def __init__(self, encoder: Encoder, file: Path) -> None:
        self._encoder = encoder
        self._file = file

    def recipe(self) -> Mapping[str, str | int | float]:
        # Not a hash of the file: such files have tens of gigabytes.
        facts = self._file.stat()
        return {"faiss_file": str(self._file.resolve()), "bytes": facts.st_size, "changed_ns": facts.st_mtime_ns}

    def build(self, corpus: Corpus, scratch: Path | None = None) -> "_UsersIndex":
        """Return the user's index. Raises: OperatorError when it is none, or not of this corpus."""
        try:
            vectors = read_faiss(self._file, self._encoder)
        except OSError as error:
            raise OperatorError(
                f"retriever: --index-path {self._file} cannot be read ({error.strerror}). "
                "Give a FAISS index file, or a folder for an index that is built."
            ) from None
        if vectors.ntotal != len(corpus):
            raise OperatorError(
                f"retriever: {self._file} holds {vectors.ntotal} vectors, and the corpus {len(corpus)} documents. "
                "Set --corpus-path to the corpus that the index was made of."
            )
        return _UsersIndex(self._encoder, vectors)

    def load(self, folder: Path) -> "_UsersIndex":
        return _UsersIndex(self._encoder, read_faiss(self._file, self._encoder))


class _UsersIndex(DenseIndex):
    def save(self, folder: Path) -> None:
        """Write nothing: the file stays where it is."""
