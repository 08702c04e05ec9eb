"""The copies of the ledger that rank 0 asks for: each is made once, beside the coordinator's loop, then answered.

Which thread makes a copy is its maker's choice:
`in_a_thread` in a run, so that no lease, ping or acknowledgement waits for a copy; `at_once` where there are none.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from learner.ledger.ledger import Ledger
from learner.ledger.snapshot import LedgerCopy
from protocol.errors import FrameError

_END_S = 10.0
Work = Callable[[], None]


def at_once(work: Work) -> None:
    """Do the work before this returns."""
    work()


def in_a_thread(work: Work) -> None:
    """Have the work done beside the caller. A process may end before it: half a copy has no name."""
    threading.Thread(target=work, name="ledger copy", daemon=True).start()


class LedgerCopies:
    """One copy at a time. A question is known by its number and its path: put again, it has nothing written again."""

    def __init__(self, ledger: Ledger, start: Callable[[Work], None] = at_once) -> None:
        self._ledger = ledger
        self._start = start
        self._under_way: _UnderWay | None = None
        # One entry for each checkpoint of this start of the run.
        self._made: set[tuple[Path, int]] = set()
        self._answers: list[tuple[str, int]] = []

    def knows(self, path: Path, request: int) -> bool:
        """Return whether this question has begun a copy: then its file may be there, or moved with its folder."""
        question = (path, request)
        return question in self._made or (self._under_way is not None and self._under_way.question == question)

    @property
    def has_questions(self) -> bool:
        """False when `take_answers` has nothing to return, now or later."""
        return self._under_way is not None or bool(self._answers)

    @property
    def is_making(self) -> bool:
        """Return whether a copy has been begun and is not whole yet."""
        return self._under_way is not None and not self._under_way.has_ended.is_set()

    def ask(self, peer: str, path: Path, request: int) -> None:
        """Begin the copy of this moment, unless this question began one before: then it changes nothing.

        Raises: FrameError while another question's copy is under way; OperatorError when the ledger cannot be read.
        """
        question = (path, request)
        if question in self._made:
            # By now the copy may be part of a checkpoint's manifest.
            self._answers.append((peer, request))
            return
        if self._under_way is None:
            self._under_way = _UnderWay(question, self._ledger.begin_copy(path))
            self._start(self._under_way.make)
        elif self._under_way.question != question:
            problem = f"is asked for while the copy {self._under_way.question[0]} is under way"
            raise FrameError("$.path", problem, "busy")
        self._under_way.peers.add(peer)

    def take_answers(self) -> list[tuple[str, int]]:
        """Return (peer, request) of whoever asked for a copy that is whole now, and forget them.

        Raises: what a copy failed by, an OperatorError for what the disk refused.
        """
        ended = self._under_way
        if ended is not None and ended.has_ended.is_set():
            self._under_way = None
            if ended.error is not None:
                raise ended.error
            self._made.add(ended.question)
            self._answers += [(peer, ended.question[1]) for peer in sorted(ended.peers)]
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Give up the copy that is under way, if one is. Blocks until its last write has ended, at most 10 s: a disk
        that takes longer keeps a thread busy which gives its file no name any more."""
        if self._under_way is not None:
            self._under_way.copy.give_up()
            self._under_way.has_ended.wait(_END_S)


class _UnderWay:
    """A copy that is being made, who waits for it, and how it ended."""

    def __init__(self, question: tuple[Path, int], copy: LedgerCopy) -> None:
        self.question = question
        self.copy = copy
        self.peers: set[str] = set()
        self.error: BaseException | None = None
        self.has_ended = threading.Event()

    def make(self) -> None:
        try:
            self.copy.make()
        except BaseException as error:  # raised again in the coordinator's thread, which it ends
            self.error = error
        finally:
            self.has_ended.set()
