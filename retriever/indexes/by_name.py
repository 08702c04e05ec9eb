"""The indexes that `--retriever-name` can choose. A new one is a file beside this one and a line here."""

from retriever.indexes.bm25 import Bm25Index
from retriever.indexes.index import Index

INDEXES: dict[str, type[Index]] = {
    "bm25": Bm25Index,
}
