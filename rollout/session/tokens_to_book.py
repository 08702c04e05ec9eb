"""The session's part of the token books: every generated token, counted as it comes, is told to the coordinator.

    Engine.on_tokens -> TokenTally -> TokensCounted ... Done -> the ended attempts are forgotten
                                      no answer: told again

Counts are totals of attempts, so a message may be lost or repeated. An attempt's last count is sent before its result,
and its count so far before its kept turns.
What a killed session left in its file is told by the next session of the run on this node.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from protocol.node.home import sluice_home
from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from rollout.episodes.conversation import Generator, SampleTask
from rollout.session.samples_in_flight import SampleAttachment
from rollout.session.token_tally import LeftTally, TokenTally

_EVERY_S = 2.0
_NUM_AWAITED = 1024  # messages whose answer still counts


class TokensToBook(SampleAttachment):
    """The counts of one session: an attachment of its samples."""

    def __init__(self, spec: RunSpec, clock: Callable[[], float], server: str, engine: Generator) -> None:
        """clock: monotonic seconds. engine: its tokens are counted from now on."""
        self._spec = spec
        self._clock = clock
        self._engine = engine
        self._folder = tokens_folder(spec.run_id)
        self._session = f"{server}-{spec.incarnation}-{uuid.uuid4().hex[:12]}"
        self._tally = TokenTally(self._folder / self._session, spec.incarnation)
        engine.on_tokens = self._tally.count
        self._resumed: dict[str, tuple[int, int]] = {}  # key -> model tokens from an earlier attempt, its number
        self._ended: list[str] = []  # keys whose last count was not sent
        self._sent: dict[str, m.TokenCount] = {}
        self._num_sent = 0  # sum of all counts as they were sent last
        self._num_messages = 0
        self._unanswered: dict[int, dict[str, m.TokenCount]] = {}  # message -> its rows by key
        self._left: dict[str, LeftTally] = {}  # session -> its file
        self._left_in: dict[int, tuple[str, int]] = {}  # message -> session whose counts are in it, its first row
        self._told_at = float("-inf")

    def on_lease(self, lease: m.Lease, buffers: Sequence[bytes]) -> None:
        """Note which tokens of resumed samples other attempts generated."""
        for part in lease.resumed or []:
            num_tokens = sum(span.end - span.start for span in part.version_spans)
            self._resumed[f"{lease.group}/{part.sample_index}/{lease.attempt}"] = (num_tokens, part.attempt)

    def on_start(self, sample: SampleTask) -> None:
        resumed, by = self._resumed.pop(sample.key, (0, 0))
        row = m.TokenCount(
            sample.group, sample.sample_index, sample.incarnation, sample.attempt, num_resumed=resumed, resumed_from=by
        )
        self._tally.begin(sample.key, row)

    def on_result(self, sample: SampleTask, how: str) -> None:
        """Note how a sample ended, before its result is sent: done, failed or stopped."""
        self._tally.end(sample.key, how)
        self._ended.append(sample.key)

    def on_message(self, message: m.Message) -> None:
        """Forget what the coordinator has in its books."""
        if not isinstance(message, m.Done) or not message.request:
            return
        for key, row in self._unanswered.pop(message.request, {}).items():
            # A later message may have more of the attempt, and be lost: the answer is for this one's row.
            if key in self._sent and row.how and row == self._tally.row(key):
                self._tally.forget(key)
                del self._sent[key]
        session, first = self._left_in.pop(message.request, ("", 0))
        if (left := self._left.get(session)) is not None:
            left.unbooked.discard(first)
            if not left.unbooked:
                self._left.pop(session).close(is_booked=True)

    def due_messages(self) -> Iterator[tuple[m.Message, list[bytes]]]:
        """Yield the last counts of ended attempts, and every two seconds all counts that the coordinator lacks."""
        keys, self._ended = self._ended, []
        is_time = self._clock() - self._told_at >= _EVERY_S
        if is_time:
            self._told_at = self._clock()
            for answers in (self._unanswered, self._left_in):
                for number in list(answers)[:-_NUM_AWAITED]:
                    del answers[number]
            yield from self._tell_left()
            keys = list(self._tally)
        known = set(self._tally)
        rows = {key: self._tally.row(key) for key in dict.fromkeys(keys) if key in known}
        yield from self.messages_of(
            key for key, row in rows.items() if row.how or (row.num_tokens and row != self._sent.get(key))
        )

    def messages_of(self, keys: Iterable[str]) -> Iterator[tuple[m.Message, list[bytes]]]:
        """Yield the counts of these attempts."""
        known = set(self._tally)
        rows = {key: self._tally.row(key) for key in keys if key in known}
        for first in range(0, len(rows), m.MAX_TOKEN_COUNTS):
            part = list(rows)[first : first + m.MAX_TOKEN_COUNTS]
            for key in part:
                before = self._sent.get(key)
                self._num_sent += rows[key].num_tokens - (before.num_tokens if before is not None else 0)
                self._sent[key] = rows[key]
            number, message = self._message(self._session, [rows[key] for key in part], self._num_sent)
            self._unanswered[number] = {key: rows[key] for key in part}
            yield message, []

    def finish(self) -> None:
        """Have everything told at once: no further token comes."""
        self._engine.on_tokens = lambda request_id, num_tokens: None
        self._tally.end("", "stopped")
        self._told_at = float("-inf")

    @property
    def is_booked(self) -> bool:
        """True once the coordinator has every count of this session, and of those that it speaks for."""
        return not list(self._tally) and not self._left

    def close(self) -> None:
        """Leave what is not in the books to the next session of the run."""
        self._engine.on_tokens = lambda request_id, num_tokens: None
        self._tally.close()
        for left in self._left.values():
            left.close(is_booked=False)

    def _tell_left(self) -> Iterator[tuple[m.Message, list[bytes]]]:
        """Yield the counts of sessions that ended without their last word."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in self._left and path.name != self._session and not path.name.startswith("."):
                try:
                    self._left[path.name] = LeftTally(path)
                except OSError:
                    continue
        for session, left in self._left.items():
            for first in sorted(left.unbooked):
                rows = left.rows[first : first + m.MAX_TOKEN_COUNTS]
                number, message = self._message(session, rows, left.num_generated)
                self._left_in[number] = (session, first)
                yield message, []

    def _message(self, session: str, rows: Sequence[m.TokenCount], num_generated: int) -> tuple[int, m.TokensCounted]:
        self._num_messages += 1
        return self._num_messages, m.TokensCounted(
            run_id=self._spec.run_id,
            incarnation=self._spec.incarnation,
            request=self._num_messages,
            session=session,
            num_generated=num_generated,
            rows=list(rows),
        )


def tokens_folder(run_id: str) -> Path:
    """Return the folder of this node with the counts of a run's sessions."""
    return sluice_home() / "tokens" / run_id
