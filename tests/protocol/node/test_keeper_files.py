"""A file of another node in pieces: in order, some ahead, and asked for again when one does not come."""

from collections.abc import Callable

import pytest

from protocol.errors import NeighbourError
from protocol.node import keeper_files
from protocol.node.keeper_files import pieces

CONTENT = bytes(range(256)) * 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_files, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(keeper_files, "_AGAIN_S", 0.0)


def ask(path: str, offset: int, size: int) -> Callable[[], bytes]:
    return lambda: CONTENT[offset : offset + size]


def test_pieces_come_in_order_and_whole() -> None:
    assert list(pieces("f", len(CONTENT), ask, lambda reference: reference())) == [
        CONTENT[:1000], CONTENT[1000:2000], CONTENT[2000:],
    ]  # fmt: skip


def test_empty_file_has_no_pieces() -> None:
    assert list(pieces("f", 0, ask, lambda reference: reference())) == []


@pytest.mark.parametrize("error", [NeighbourError("keeper", "died"), ValueError("no such actor")])
def test_piece_that_does_not_come_is_asked_for_again(error: Exception) -> None:
    failures = iter([None, error, error, None, error])

    def take(reference: Callable[[], bytes]) -> bytes:
        if (failure := next(failures, None)) is not None:
            raise failure
        return reference()

    assert b"".join(pieces("f", len(CONTENT), ask, take)) == CONTENT


def test_silence_is_given_up_with_the_last_reason() -> None:
    def take(reference: Callable[[], bytes]) -> bytes:
        raise NeighbourError("keeper", "died")

    with pytest.raises(NeighbourError, match="f cannot be read on the node that has it: keeper: died"):
        list(pieces("f", len(CONTENT), ask, take, silence_s=0.0))
