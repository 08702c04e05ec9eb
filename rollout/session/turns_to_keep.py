"""Finished turns of samples in flight, until the coordinator has them: sent, sent again, and answered.

    keep -> due -> TurnsDone ... TurnsKept -> before_step returns
                   no answer in time, or one that names fewer tokens: sent again from the last kept token

A conversation asks its environment for the next reply only once the turn before is kept, so that a server that dies
costs it the turn under way and no other, and no tool is called twice for a turn that is kept.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import msgspec

from protocol.wire.conversation import LARGEST_NUMBER, MAX_TURNS, ConversationPart, split_buffers
from protocol.wire.messages import MAX_PARTS, KeptSample, Lease
from rollout.environments.guard import GuardedEnvironment
from rollout.environments.snapshots import is_resumable, resume_from, snapshot_of
from rollout.episodes.sample import SampleTask
from rollout.episodes.transcript import Transcript

# The policy writes meanwhile: turns that end within so long go as one message.
_BUNDLE_S = 0.02
_RESEND_S = 2.0
# A coordinator that is gone does not end what a server has in hand: what it finishes is kept for the next start.
_ANSWER_S = 10.0
# Of one message: its frames and header stay far below their limits.
_MAX_TOKENS = 1 << 22
_MAX_ENTRIES = 8192
_MAX_LOGS, _MAX_HASHES = 64, 16
_Place = tuple[str, int]


@dataclass(frozen=True)
class Interrupted:
    """A conversation that another server began."""

    transcript: Transcript  # transcript up to the reply to the last finished turn
    snapshot: str  # environment's state there, as JSON


def interrupted_samples(lease: Lease, buffers: Sequence[bytes]) -> dict[tuple[str, int, int], Interrupted]:
    """Return a lease's samples that other servers began, by group, index and attempt.

    buffers: their arrays. Raises: FrameError when the arrays have other lengths.
    """
    parts = lease.resumed or []
    arrays = split_buffers(parts, buffers, "$.resumed") if parts else []
    return {
        (lease.group, part.sample_index, lease.attempt): Interrupted(Transcript.of_part(part, each), part.snapshot)
        for part, each in zip(parts, arrays, strict=True)
    }


class TurnsToKeep:
    """Of the samples of one session. clock: monotonic seconds. on_news: called when there is something to send."""

    def __init__(self, clock: Callable[[], float], on_news: Callable[[], None]) -> None:
        self.clock = clock
        self.is_answered = True  # False: the coordinator left turns without an answer, and has given none since
        self.interrupted: dict[tuple[str, int, int], Interrupted] = {}  # samples to resume, until they start
        self._on_news = on_news
        self._keepers: dict[_Place, Keeper] = {}
        self._unsent: dict[_Place, None] = {}
        self._is_bundling = False
        # In the order of their times.
        self._sent_at: dict[_Place, float] = {}

    def keeper_of(self, sample: SampleTask) -> "Keeper":
        """Return what a sample that begins now tells of its turns."""
        before = self.interrupted.pop((sample.group, sample.sample_index, sample.attempt), None)
        keeper = self._keepers[sample.group, sample.sample_index] = Keeper(self, sample, before)
        return keeper

    def forget(self, place: tuple[str, int]) -> None:
        """Send nothing more of a sample: it is done. place: its group's name and its index."""
        self._keepers.pop(place, None)
        self._drop(place)

    def note(self, place: _Place) -> None:
        """Take in that a sample has turns to send."""
        self._sent_at.pop(place, None)
        self._unsent[place] = None
        if not self._is_bundling:
            self._is_bundling = True
            asyncio.get_running_loop().call_later(_BUNDLE_S, self._end_bundle)

    def due(self) -> Iterator[tuple[list[ConversationPart], list[bytes]]]:
        """Yield what is to be sent now, parts and arrays of one message after the other, and count it as sent."""
        now = self.clock()
        late = [place for place, _ in takewhile(lambda entry: entry[1] <= now - _RESEND_S, self._sent_at.items())]
        places = deque([*(() if self._is_bundling else self._unsent), *late])
        while places:
            parts: list[ConversationPart] = []
            arrays: list[list[bytes]] = []
            num_tokens = num_entries = 0
            while places and len(parts) < MAX_PARTS and num_tokens < _MAX_TOKENS and num_entries < _MAX_ENTRIES:
                place = places.popleft()
                self._drop(place)
                keeper = self._keepers.get(place)  # gone: it ended while the message before was sent
                if keeper is not None and (made := keeper.part()) is not None:
                    self._sent_at[place] = now
                    parts.append(made[0])
                    arrays.append(made[1])
                    num_tokens += made[0].num_tokens
                    num_entries += len(made[0].turns) + len(made[0].version_spans)
            if parts:
                yield parts, [b"".join(each) for each in zip(*arrays, strict=True)]

    def on_kept(self, samples: Iterable[KeptSample]) -> list[KeptSample]:
        """Take in what the coordinator has of samples; returns those that are another server's by now."""
        self.is_answered = True
        lost: list[KeptSample] = []
        for one in samples:
            place = (one.group, one.sample_index)
            keeper = self._keepers.get(place)
            if keeper is None or keeper.sample.attempt != one.attempt:
                continue
            if not one.is_yours:
                lost.append(one)
            elif keeper.on_kept(one.num_tokens):
                self._drop(place)
            else:
                self.note(place)
        return lost

    def _end_bundle(self) -> None:
        self._is_bundling = False
        self._on_news()

    def _drop(self, place: _Place) -> None:
        self._unsent.pop(place, None)
        self._sent_at.pop(place, None)


class Keeper:
    """One sample's `TurnListener`."""

    def __init__(self, shared: TurnsToKeep, sample: SampleTask, before: Interrupted | None = None) -> None:
        """before: conversation to resume; None: the sample begins."""
        self.sample = sample
        self._before = before
        self._shared = shared
        # Another server's turns are kept already, or this sample would not go on from them.
        self._num_kept = len(before.transcript) if before is not None else 0
        self._noted: ConversationPart | None = None
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
            return  # from here on it could only begin anew; its trajectory will be refused by name
        # Turns and tokens are cut out of the transcript when they are sent: until then it only grows behind them.
        self._transcript = transcript
        self._noted = ConversationPart(
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
        self._shared.note((sample.group, sample.sample_index))

    async def before_step(self) -> None:
        if self._is_kept.is_set() or not self._shared.is_answered:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._is_kept.wait()
        except TimeoutError:
            self._shared.is_answered = False

    def on_kept(self, num_tokens: int) -> bool:
        """Take in how many tokens are kept; returns whether that is all that was to be."""
        self._num_kept = num_tokens
        if self._noted is not None and num_tokens < self._noted.num_tokens:
            return False
        self._is_kept.set()
        return True

    def part(self) -> tuple[ConversationPart, list[bytes]] | None:
        """Return what is not kept yet; None when there is nothing."""
        noted, transcript, first = self._noted, self._transcript, self._num_kept
        if noted is None or transcript is None or first >= noted.num_tokens:
            return None
        end = noted.num_tokens
        part = msgspec.structs.replace(
            noted,
            first_token=first,
            num_tokens=end - first,
            version_spans=[span for span in transcript.version_spans if first <= span.start < end],
            turns=[turn for turn in transcript.turns if first <= turn.start < end],
        )
        return part, transcript.buffers(first, end)


def _is_sendable(transcript: Transcript) -> bool:
    """Return whether what a user's environment gave has room in a message, and the whole in one lease."""
    if max(len(transcript.turns), len(transcript.version_spans), len(transcript.turn_rewards)) > MAX_TURNS:
        return False
    of_turns = (turn.reward for turn in transcript.turn_rewards)
    numbers = (transcript.reward or 0.0, transcript.score or 0.0, *transcript.logs.values(), *of_turns)
    return all(abs(number) <= LARGEST_NUMBER for number in numbers)
