"""Which indexes answered a sample's searches, and where: noted where an answer comes in, for who plays the sample."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Sources:
    """What answered the searches of one sample."""

    content_hashes: set[str] = field(default_factory=set)  # of the indexes that tell theirs
    num_searches: int = 0  # that other nodes' retrievers would have answered, had the own one been down
    num_elsewhere: int = 0  # those of them that another node's did answer


# A task inherits the sources of the task that began it, and adds to the very same ones.
_sources: ContextVar[Sources | None] = ContextVar("sources", default=None)


@contextmanager
def noted_sources() -> Iterator[Sources]:
    """Yield what is noted of all searches within the block, and in tasks begun in it."""
    sources = Sources()
    token = _sources.set(sources)
    try:
        yield sources
    finally:
        _sources.reset(token)


def note_source(content_hash: str, is_elsewhere: bool | None = None) -> None:
    """Note what answered a search.

    content_hash: of its index; "" for a service that tells none. is_elsewhere: whether it is another node's; None:
    there is no other.
    """
    sources = _sources.get()
    if sources is None:
        return
    sources.num_searches += is_elsewhere is not None
    sources.num_elsewhere += bool(is_elsewhere)
    if content_hash:
        sources.content_hashes.add(content_hash)
