"""Records which retrievers answered a sample's searches, from the client to the sample's player."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Sources:
    """The retrievers that answered one sample's searches."""

    content_hashes: set[str] = field(default_factory=set)  # content hashes of the indexes, where known
    num_with_fallback: int = 0  # searches for which another node's retriever was configured
    num_elsewhere: int = 0  # searches that another node's retriever answered


# A task inherits the sources of its parent task: the same object.
_sources: ContextVar[Sources | None] = ContextVar("sources", default=None)


@contextmanager
def record_sources() -> Iterator[Sources]:
    """Yield the record of all searches within the block, including its child tasks."""
    sources = Sources()
    token = _sources.set(sources)
    try:
        yield sources
    finally:
        _sources.reset(token)


def add_source(content_hash: str, is_elsewhere: bool | None = None) -> None:
    """Record an answered search.

    content_hash: of the index; "" if unknown.
    is_elsewhere: whether another node answered; None: no other retriever is configured.
    """
    sources = _sources.get()
    if sources is None:
        return
    sources.num_with_fallback += is_elsewhere is not None
    sources.num_elsewhere += bool(is_elsewhere)
    if content_hash:
        sources.content_hashes.add(content_hash)
