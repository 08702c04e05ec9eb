"""Finished turns that survive a server: sent to the coordinator, resent until it confirms them. Optional.

    on_turn_finished -> due_messages -> TurnsDone ... TurnsKept -> before_step returns
                        no answer in time, or one with fewer tokens: resent from the last kept token

A conversation gives its environment the next turn only after the turn before is kept. So a crashed server costs it the
current turn only, and no tool is called twice for a kept turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import msgspec

from protocol.settings.run_spec import RunSpec
from protocol.wire import messages as m
from protocol.wire.conversation import LARGEST_NUMBER, MAX_TURNS, ConversationPart, split_buffers
from rollout.environments.guard import GuardedEnvironment
from rollout.environments.snapshots import is_resumable, resume_from, snapshot_of
from rollout.episodes.conversation import SampleTask
from rollout.episodes.transcript import Transcript
from rollout.session.samples_in_flight import SampleAttachment

_BUNDLE_S = 0.02  # turns that finish within this time share a message; the policy writes meanwhile
_RESEND_S = 2.0
# Without an answer for this long, samples continue: their results are kept for the next start of the run.
_ANSWER_S = 10.0
# Limits of one message, far below those of a frame and of a header in `protocol.wire`.
_MAX_TOKENS = 1 << 22
_MAX_ENTRIES = 8192
_MAX_LOGS, _MAX_HASHES = 64, 16
_Place = tuple[str, int]  # (group, sample index)
_Message = tuple[m.Message, list[bytes]]


@dataclass(frozen=True)
class InterruptedSample:
    """A conversation that another server began."""

    transcript: Transcript  # transcript up to the reply to the last finished turn
    snapshot: str  # environment's state there, as JSON


class TurnsToKeep(SampleAttachment):
    """The kept turns of one session: an attachment of its samples."""

    def __init__(
        self,
        spec: RunSpec,
        clock: Callable[[], float],
        wake: Callable[[], None],
        stop: Callable[[str, int, int], None],
        counts_of: Callable[[Iterable[str]], Iterator[_Message]] = lambda keys: iter(()),
    ) -> None:
        """clock: monotonic seconds. wake: sends due messages. stop: stops a sample (group, index, attempt).

        counts_of: returns the messages with the tokens of these samples (`SampleTask.key`).
        """
        self.is_answered = True  # False: the coordinator has not answered for `_ANSWER_S`
        self._spec = spec
        self._clock = clock
        self._wake = wake
        self._stop = stop
        self._counts_of = counts_of
        self._interrupted: dict[tuple[str, int, int], InterruptedSample] = {}  # samples to resume, until they start
        self._keepers: dict[_Place, Keeper] = {}
        self._unsent: dict[_Place, None] = {}
        self._is_bundling = False
        self._sent_at: dict[_Place, float] = {}  # sorted by time

    def on_lease(self, lease: m.Lease, buffers: Sequence[bytes]) -> None:
        """Store the conversations that other servers began. Raises: FrameError if the buffers have other lengths."""
        parts = lease.resumed or []
        arrays = split_buffers(parts, buffers, "$.resumed") if parts else []
        for part, each in zip(parts, arrays, strict=True):
            interrupted = InterruptedSample(Transcript.of_part(part, each), part.snapshot)
            self._interrupted[lease.group, part.sample_index, lease.attempt] = interrupted

    def on_start(self, sample: SampleTask) -> "Keeper | None":
        """Return the listener of a sample that starts."""
        before = self._interrupted.pop((sample.group, sample.sample_index, sample.attempt), None)
        if not self._spec.rollout.resume_turns:
            return None
        keeper = self._keepers[sample.group, sample.sample_index] = Keeper(self, sample, before)
        return keeper

    def on_end(self, sample: SampleTask) -> None:
        """Forget a finished sample. `due_messages` skips its turns."""
        self._keepers.pop((sample.group, sample.sample_index), None)

    def on_message(self, message: m.Message) -> None:
        """Apply the coordinator's confirmations, and stop samples that another server has taken over."""
        if not isinstance(message, m.TurnsKept):
            return
        self.is_answered = True
        for one in message.samples:
            place = (one.group, one.sample_index)
            keeper = self._keepers.get(place)
            if keeper is None or keeper.sample.attempt != one.attempt:
                continue
            if not one.is_yours:
                # Its tools would be called twice from here on.
                self._stop(one.group, one.sample_index, one.attempt)
            elif keeper.confirm(one.num_tokens):
                self._drop(place)
            else:
                self.mark_unsent(place)

    def due_messages(self) -> Iterator[_Message]:
        """Yield the messages to send now with their arrays, and mark their turns as sent.

        The counts of their tokens go first: this node may be lost, and another one train them.
        """
        now = self._clock()
        late = [place for place, _ in takewhile(lambda entry: entry[1] <= now - _RESEND_S, self._sent_at.items())]
        places = deque([*(() if self._is_bundling else self._unsent), *late])
        while places:
            parts: list[ConversationPart] = []
            arrays: list[list[bytes]] = []
            keys: list[str] = []
            num_tokens = num_entries = 0
            while places and len(parts) < m.MAX_PARTS and num_tokens < _MAX_TOKENS and num_entries < _MAX_ENTRIES:
                place = places.popleft()
                self._drop(place)
                keeper = self._keepers.get(place)  # None: the sample ended while the last message was sent
                if keeper is not None and (unsent := keeper.part()) is not None:
                    self._sent_at[place] = now
                    parts.append(unsent[0])
                    arrays.append(unsent[1])
                    keys.append(keeper.sample.key)
                    num_tokens += unsent[0].num_tokens
                    num_entries += unsent[0].num_entries
            if parts:
                yield from self._counts_of(keys)
                message = m.TurnsDone(run_id=self._spec.run_id, incarnation=self._spec.incarnation, parts=parts)
                yield message, [b"".join(each) for each in zip(*arrays, strict=True)]

    def mark_unsent(self, place: _Place) -> None:
        """Send a sample's turns with the next bundle."""
        self._sent_at.pop(place, None)
        self._unsent[place] = None
        if not self._is_bundling:
            self._is_bundling = True
            asyncio.get_running_loop().call_later(_BUNDLE_S, self._end_bundle)

    def _end_bundle(self) -> None:
        self._is_bundling = False
        self._wake()

    def _drop(self, place: _Place) -> None:
        self._unsent.pop(place, None)
        self._sent_at.pop(place, None)


class Keeper:
    """The `TurnListener` of one sample."""

    def __init__(self, shared: TurnsToKeep, sample: SampleTask, before: InterruptedSample | None) -> None:
        """before: conversation to resume; None: the sample begins."""
        self.sample = sample
        self._before = before
        self._shared = shared
        # The coordinator has the turns of another server, from which this sample resumes.
        self._num_kept = len(before.transcript) if before is not None else 0
        self._newest: ConversationPart | None = None
        self._transcript: Transcript | None = None
        self._is_kept = asyncio.Event()
        self._is_kept.set()

    async def take_up(self, environment: GuardedEnvironment) -> Transcript | None:
        before = self._before
        if before is None or not is_resumable(type(environment.inner)):
            return None
        await resume_from(environment, before.snapshot)
        return before.transcript

    def on_turn_finished(self, transcript: Transcript, environment: GuardedEnvironment) -> None:
        sample, snapshot = self.sample, snapshot_of(environment)
        if snapshot is None or not _is_sendable(transcript):
            return  # without a kept turn the sample begins again; an invalid trajectory fails later by name
        # Turns and tokens are cut out of the transcript at the time of sending: until then it only grows.
        self._transcript = transcript
        self._newest = ConversationPart(
            group=sample.group,
            sample_index=sample.sample_index,
            attempt=sample.attempt,
            num_tokens=len(transcript),
            num_prompt_tokens=transcript.num_prompt_tokens,
            version_spans=[],
            turns=[],
            snapshot=snapshot,
            started_at=transcript.started_at,
            generate_s=transcript.generate_s,
            environment_s=transcript.environment_s,
            reward=transcript.reward,
            score=transcript.score,
            logs=dict(islice(transcript.logs.items(), _MAX_LOGS)),
            content_hashes=transcript.content_hashes[:_MAX_HASHES],
            turn_rewards=transcript.turn_rewards,
        )
        self._is_kept.clear()
        self._shared.mark_unsent((sample.group, sample.sample_index))

    async def before_step(self) -> None:
        if self._is_kept.is_set() or not self._shared.is_answered:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._is_kept.wait()
        except TimeoutError:
            self._shared.is_answered = False

    def confirm(self, num_tokens: int) -> bool:
        """Record the number of kept tokens; return whether everything is kept."""
        self._num_kept = num_tokens
        if self._newest is not None and num_tokens < self._newest.num_tokens:
            return False
        self._is_kept.set()
        return True

    def part(self) -> tuple[ConversationPart, list[bytes]] | None:
        """Return the turns that are not kept yet, with their arrays; None without any."""
        newest, transcript, first = self._newest, self._transcript, self._num_kept
        if newest is None or transcript is None or first >= newest.num_tokens:
            return None
        end = newest.num_tokens
        part = msgspec.structs.replace(
            newest,
            first_token=first,
            num_tokens=end - first,
            version_spans=[span for span in transcript.version_spans if first <= span.start < end],
            turns=[turn for turn in transcript.turns if first <= turn.start < end],
        )
        return part, transcript.buffers(first, end)


def _is_sendable(transcript: Transcript) -> bool:
    """Return whether the environment's data fits into a message, and the whole conversation into a lease."""
    if max(len(transcript.turns), len(transcript.version_spans), len(transcript.turn_rewards)) > MAX_TURNS:
        return False
    turn_rewards: Iterable[float] = (turn.reward for turn in transcript.turn_rewards)
    numbers = (transcript.reward or 0.0, transcript.score or 0.0, *transcript.logs.values(), *turn_rewards)
    return all(abs(number) <= LARGEST_NUMBER for number in numbers)
