"""Counts of the tokens that an engine generates for each attempt at a sample, in a file that outlives this process.

The file has one slot for each attempt: its count, how it ended, and its name. Another session on this node reads the
file of a session that was killed. A file that cannot be made leaves the counts in memory.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol.disk.lock import try_lock
from protocol.wire.messages import MAX_TOKEN_COUNTS, TokenCount

_SLOT_BYTES = 1024
_SLOT = _SLOT_BYTES // 8  # a slot in words of 8 bytes: a kill never leaves half a word
_COUNT, _LENGTH, _END, _NAME = 0, 1, 2, 3  # words of a slot; the name's length is 0 in a free one
_NUM_AT_FIRST = 64
_ENDS = ("", "done", "failed", "stopped")
_DIED = "died"
PROBES = "-"
"""In place of a group: tokens that the engine generates for no sample, such as those of probes of weights."""


class TokenTally:
    """One session's counts. Slot 0 has the sum of the attempts that were forgotten."""

    def __init__(self, path: Path, incarnation: int) -> None:
        """incarnation: start of the run that the session serves."""
        self._path = path
        self._incarnation = incarnation
        self._slots: dict[str, int] = {}
        self._rows: dict[str, TokenCount] = {}
        self._descriptor = _make_file(path, _NUM_AT_FIRST * _SLOT_BYTES)
        if self._descriptor is not None:
            self._memory = mmap.mmap(self._descriptor, _NUM_AT_FIRST * _SLOT_BYTES)
        else:  # private: shared memory without a file does not grow
            self._memory = mmap.mmap(-1, _NUM_AT_FIRST * _SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._words = memoryview(self._memory).cast("Q")
        self._free = list(range(_NUM_AT_FIRST - 1, 0, -1))
        self.begin("", TokenCount(PROBES, 0, incarnation, 0))

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._slots))

    def begin(self, key: str, row: TokenCount) -> None:
        """Count the tokens of requests whose ids begin with `key` and a slash. A known key is not begun again."""
        if key in self._slots:
            return
        if not self._free and not self._grow():
            return  # a full disk: its tokens are counted as those of no sample
        slot = self._free.pop()
        first, name = slot * _SLOT, msgspec.msgpack.encode(row)
        self._words[first + _COUNT] = self._words[first + _END] = 0
        self._memory[(first + _NAME) * 8 : (first + _NAME) * 8 + len(name)] = name
        self._words[first + _LENGTH] = len(name)
        self._slots[key], self._rows[key] = first, row

    def count(self, request_id: str, num_tokens: int) -> None:
        """Count tokens of one request."""
        first = self._slots.get(request_id.rpartition("/")[0])
        self._words[self._slots[""] if first is None else first] += num_tokens

    def end(self, key: str, how: str) -> None:
        """Note how an attempt ended: done, failed or stopped. The first end counts."""
        first = self._slots.get(key)
        if first is not None and not self._words[first + _END]:
            self._words[first + _END] = _ENDS.index(how)

    def row(self, key: str) -> TokenCount:
        """Return the attempt's count so far."""
        first = self._slots[key]
        how = _ENDS[self._words[first + _END]]
        return msgspec.structs.replace(self._rows[key], num_tokens=self._words[first + _COUNT], how=how)

    def forget(self, key: str) -> None:
        """Free the slot of an attempt that the coordinator has in its books."""
        first = self._slots.pop(key)
        del self._rows[key]
        self._words[_COUNT] += self._words[first + _COUNT]
        self._words[first + _LENGTH] = 0
        self._free.append(first // _SLOT)

    def close(self) -> None:
        """Close the file, and remove it when every attempt is forgotten."""
        self._words.release()
        self._memory.close()
        if self._descriptor is not None:
            if not self._slots:
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)

    def _grow(self) -> bool:
        num = len(self._words) // _SLOT
        if self._descriptor is not None and not _has_allocated(self._descriptor, 2 * num * _SLOT_BYTES):
            return False
        self._words.release()
        self._memory.resize(2 * num * _SLOT_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._free = list(range(2 * num - 1, num - 1, -1))
        return True


class LeftTally:
    """The file of a session that has ended without its last word. It is locked until `close`."""

    def __init__(self, path: Path) -> None:
        """Raises: BlockingIOError when its session goes on, OSError when it cannot be read."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR)
        try:
            if not try_lock(self._descriptor) or not path.exists():  # another session may have removed it
                raise BlockingIOError(f"{path} belongs to a session that goes on")
            data = path.read_bytes()
        except BaseException:
            os.close(self._descriptor)
            raise
        words = memoryview(data).cast("Q")
        self.rows: list[TokenCount] = []
        for first in range(_SLOT, len(words) - len(words) % _SLOT, _SLOT):
            if length := words[first + _LENGTH]:
                name = data[(first + _NAME) * 8 : (first + _NAME) * 8 + length]
                row = msgspec.msgpack.decode(name, type=TokenCount)
                how = _ENDS[words[first + _END]] or _DIED
                self.rows.append(msgspec.structs.replace(row, num_tokens=words[first + _COUNT], how=how))
        forgotten = words[_COUNT] if len(words) else 0
        self.num_generated = forgotten + sum(row.num_tokens for row in self.rows)
        self.unbooked = set(range(0, max(1, len(self.rows)), MAX_TOKEN_COUNTS))  # first rows of messages to send

    def close(self, *, is_booked: bool) -> None:
        """Release the file; one that is in the books is removed."""
        if is_booked:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _make_file(path: Path, size: int) -> int | None:
    """Return the descriptor of a new, locked file; None where the disk has no room or no locks.

    It gets its name when it is locked: another session would take it for one that a killed session left.
    """
    hidden, descriptor = path.with_name(f".{path.name}"), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if try_lock(descriptor) and _has_allocated(descriptor, size):
            hidden.rename(path)
            return descriptor
    except OSError:
        pass
    if descriptor is not None:
        hidden.unlink(missing_ok=True)
        os.close(descriptor)
    return None


def _has_allocated(descriptor: int, size: int) -> bool:
    """Return whether the disk has room: a write into a file without room would end this process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        return False
    return True
