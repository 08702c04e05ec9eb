"""Which indexes answered a sample's searches: noted where an answer comes in, for whoever plays the sample."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# A task inherits the set of the task that began it, and adds to the very same one.
_sources: ContextVar[set[str] | None] = ContextVar("sources", default=None)


@contextmanager
def noted_sources() -> Iterator[set[str]]:
    """Yield the set of content hashes of all retrievers that answer within the block, and in tasks begun in it."""
    sources: set[str] = set()
    token = _sources.set(sources)
    try:
        yield sources
    finally:
        _sources.reset(token)


def note_source(content_hash: str) -> None:
    """Note which index answered a search. content_hash: "" for a service that tells none."""
    sources = _sources.get()
    if sources is not None and content_hash:
        sources.add(content_hash)
