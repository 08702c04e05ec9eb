"""Turns of samples in flight that a session sends, and samples that it resumes from another server."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from protocol.wire import messages as m
from protocol.wire.conversation import ConversationPart, FinishedTurn
from protocol.wire.trajectory import MAX_CALLS, Trajectory, VersionSpan
from rollout.engine.generation import Generation
from rollout.environments.base import Resources, Step, Task, Turn
from rollout.environments.guard import GuardedEnvironment
from rollout.environments.search import Search
from rollout.episodes.conversation import SampleTask
from rollout.episodes.transcript import Transcript
from rollout.session import tokens_to_book, turns_to_keep
from rollout.session.turns_to_keep import Keeper, TurnsToKeep
from tests.fakes.clock import Clock
from tests.fakes.engines import ScriptedEngine
from tests.fakes.playing_session import PlayingSession, playing_session
from tests.fakes.rollout_fakes import make_spec
from tests.rollout.session.scene import until


def searching(num_searches: int) -> ScriptedEngine:
    """Return an engine that searches `num_searches` times before it answers."""

    def write(context: str) -> str:
        asked = context.count("<search>")
        return f"<search>{asked + 1}</search>" if asked < num_searches else "<answer>Minsk</answer>"

    return ScriptedEngine(write, version=3)


@dataclass
class Library:
    """A search that records its queries."""

    asked: list[str] = field(default_factory=list)

    async def search(self, query: str) -> list[str]:
        self.asked.append(query)
        return [f"found {query}"]

    def resources(self) -> Resources:
        return Resources(9, {"search": self.search})


async def next_turns(playing: PlayingSession) -> tuple[ConversationPart, list[bytes]]:
    """Return the single part of the next TurnsDone."""
    message = await playing.coordinator.next(m.TurnsDone)
    (part,) = message.parts
    return part, playing.coordinator.buffers[-1]


async def made(playing: PlayingSession) -> Trajectory:
    message = await playing.coordinator.next(m.TrajectoryDone)
    return Trajectory.from_buffers(message.facts, playing.coordinator.buffers[-1])


async def test_sent_turns_equal_the_trajectory() -> None:
    library = Library()
    async with playing_session(searching(2), Search, library.resources(), max_turns=9) as playing:
        playing.coordinator.lease("g")
        parts = [await next_turns(playing) for _ in range(2)]
        trajectory = await made(playing)
    assert [(part.first_token, part.snapshot) for part, _ in parts] == [
        (0, '{"turns": 1}'),
        (parts[0][0].end, '{"turns": 2}'),
    ]
    arrays: tuple[Any, ...] = (trajectory.tokens, trajectory.behaviour_logprobs, trajectory.loss_mask)
    for place, whole in enumerate(arrays):
        told = b"".join(buffers[place] for _, buffers in parts)
        assert whole.tobytes().startswith(told)
    spans = [span for part, _ in parts for span in part.version_spans]
    assert spans == trajectory.facts.version_spans[:2]


async def test_tokens_of_a_kept_turn_are_counted_before_it(monkeypatch: Any) -> None:
    """The node of a server may be lost for ever, and what it has not told with it."""
    monkeypatch.setattr(tokens_to_book, "_EVERY_S", 1000.0)
    async with playing_session(searching(2), Search, Library().resources(), max_turns=9) as playing:
        playing.coordinator.lease("g")
        kept = 0
        for _ in range(2):
            part, _ = await next_turns(playing)
            kept += sum(span.end - span.start for span in part.version_spans)
            told = [
                row for each in playing.coordinator.received if isinstance(each, m.TokensCounted) for row in each.rows
            ]
            assert max((row.num_tokens for row in told if row.group == "g"), default=0) >= kept > 0


async def test_search_waits_until_the_turn_before_is_kept() -> None:
    library = Library()
    engine = searching(2)
    async with playing_session(engine, Search, library.resources(), keeps_turns=False, max_turns=9) as playing:
        playing.coordinator.lease("g")
        first = await playing.coordinator.next(m.TurnsDone)
        await until(lambda: len(engine.requests) == 2)  # its second turn is written meanwhile
        for _ in range(100):
            await asyncio.sleep(0)
        assert library.asked == ["1"]
        playing.coordinator.tell_kept(first)
        await playing.coordinator.next(m.TurnsDone)
        assert library.asked == ["1", "2"]


async def test_lost_turns_are_resent_from_the_last_kept_token() -> None:
    async with playing_session(searching(2), Search, Library().resources(), keeps_turns=False, max_turns=9) as playing:
        playing.coordinator.lease("g")
        first = await playing.coordinator.next(m.TurnsDone)
        playing.coordinator.tell_kept(first, num_tokens=0)
        again = await playing.coordinator.next(m.TurnsDone)
        assert again.parts == first.parts
        playing.coordinator.tell_kept(again)
        second, _ = await next_turns(playing)
        assert (second.first_token, len(second.turns)) == (first.parts[0].end, 1)


async def test_turns_without_an_answer_are_resent(monkeypatch: Any) -> None:
    monkeypatch.setattr(turns_to_keep, "_RESEND_S", 0.05)
    async with playing_session(searching(2), Search, Library().resources(), keeps_turns=False, max_turns=9) as playing:
        playing.coordinator.lease("g")
        first = await playing.coordinator.next(m.TurnsDone)
        assert (await playing.coordinator.next(m.TurnsDone)).parts == first.parts


async def test_sample_of_another_server_is_stopped() -> None:
    library = Library()
    async with playing_session(searching(2), Search, library.resources(), keeps_turns=False, max_turns=9) as playing:
        playing.coordinator.lease("g")
        first = await playing.coordinator.next(m.TurnsDone)
        playing.coordinator.tell_kept(first, is_yours=False)
        await until(lambda: playing.session.num_samples == 0)
        assert library.asked == ["1"]
        assert len(playing.session.outbox) == 0


async def test_samples_finish_without_answers_of_the_coordinator(monkeypatch: Any) -> None:
    monkeypatch.setattr(turns_to_keep, "_ANSWER_S", 0.05)
    async with playing_session(searching(3), Search, Library().resources(), keeps_turns=False, max_turns=9) as playing:
        playing.coordinator.lease("g")
        assert (await made(playing)).facts.finish == "answer"


async def test_no_turns_are_sent_without_resume_turns() -> None:
    engine = searching(2)
    async with playing_session(engine, Search, Library().resources(), max_turns=9, resume_turns=False) as playing:
        playing.coordinator.lease("g")
        await made(playing)
        assert not any(isinstance(message, m.TurnsDone) for message in playing.coordinator.received)


async def test_sample_resumes_where_another_server_stopped() -> None:
    """The trajectory equals that of one server, and earlier searches are not repeated."""
    library = Library()
    engine = searching(2)
    async with playing_session(engine, Search, library.resources(), max_turns=9) as playing:
        playing.coordinator.lease("whole")
        part, buffers = await next_turns(playing)
        whole = await made(playing)
        engine.policy_version = 4
        changed = msgspec.structs.replace(part, group="again", attempt=1)
        playing.coordinator.lease("again", buffers=buffers, attempt=2, resumed=[changed], number=2)
        second, _ = await next_turns(playing)
        resumed = await made(playing)
    assert library.asked == ["1", "2", "2"]
    assert (second.first_token, second.attempt, second.snapshot) == (part.end, 2, '{"turns": 2}')
    assert resumed.tokens.tolist() == whole.tokens.tolist()
    assert resumed.behaviour_logprobs.tolist() == whole.behaviour_logprobs.tolist()
    spans = whole.facts.version_spans
    assert resumed.facts.version_spans == [spans[0], *(VersionSpan(s.start, s.end, 4) for s in spans[1:])]
    assert (resumed.facts.attempt, resumed.facts.num_turns) == (2, 3)
    assert resumed.facts.started_at == part.started_at
    assert len(engine.requests) == 3 + 2


async def test_max_turns_counts_turns_of_the_server_before() -> None:
    library = Library()
    async with playing_session(searching(9), Search, library.resources(), max_turns=9) as playing:
        playing.coordinator.lease("whole")
        part, buffers = await next_turns(playing)
        await made(playing)
        asked = len(library.asked)
        changed = msgspec.structs.replace(part, group="again", attempt=1, snapshot='{"turns": 8}')
        playing.coordinator.lease("again", buffers=buffers, attempt=2, resumed=[changed], number=2)
        assert (await made(playing)).facts.finish == "turns"
    assert len(library.asked) - asked == 1


class Forgetful:
    """Has turns, and no snapshot."""

    stop: tuple[str, ...] = ()

    def __init__(self, resources: Resources) -> None:
        self.turns = 0

    async def reset(self, task: Task) -> str:
        return "2+2="

    async def step(self, turn: Turn) -> Step:
        self.turns += 1
        return Step("again", is_done=self.turns == 3)


async def test_sample_of_an_environment_without_snapshots_begins_again() -> None:
    part = ConversationPart(
        group="g",
        sample_index=0,
        attempt=1,
        num_tokens=3,
        num_prompt_tokens=1,
        version_spans=[VersionSpan(1, 2, 3)],
        turns=[FinishedTurn(1, 2, "stop", None)],
        snapshot="null",
        started_at=1.0,
        generate_s=0.0,
        environment_s=0.0,
    )
    arrays = [
        np.array(values, kind).tobytes() for values, kind in (([65] * 3, "<i4"), ([0, -1, 0], "<f4"), ([0, 1, 0], "u1"))
    ]
    async with playing_session(ScriptedEngine(lambda context: "4", version=3), Forgetful) as playing:
        playing.coordinator.lease("g", buffers=arrays, attempt=2, resumed=[part])
        trajectory = await made(playing)
        assert trajectory.facts.num_turns == 3
        assert not any(isinstance(message, m.TurnsDone) for message in playing.coordinator.received)


async def test_lease_with_inconsistent_arrays_is_ignored() -> None:
    async with playing_session(searching(1), Search, Library().resources(), max_turns=9) as playing:
        playing.coordinator.lease("g")
        part, buffers = await next_turns(playing)
        await made(playing)
        changed = msgspec.structs.replace(part, group="again")
        playing.coordinator.lease("again", buffers=[*buffers[:2], b""], attempt=2, resumed=[changed], number=2)
        playing.coordinator.lease("other", number=3)
        assert (await made(playing)).facts.group == "other"
        assert playing.session.failures.totals == {"coordinator": 1}


async def test_turns_that_finish_within_20_ms_share_a_message() -> None:
    wakes: list[list[int]] = []  # number of parts in each message that is due at a wake
    shared, keepers = _keeping(3, lambda: wakes.append(_num_parts(shared)))
    for keeper, transcript in keepers:
        _play(transcript, 1)
        keeper.on_turn_finished(transcript, GuardedEnvironment(Search, Resources(9), 10.0))
        assert _num_parts(shared) == []
    await until(lambda: bool(wakes))
    await asyncio.sleep(2 * turns_to_keep._BUNDLE_S)
    assert wakes == [[3]]


class Overpaid(Forgetful):
    """Has two turns; the first reward is too large for a message."""

    async def step(self, turn: Turn) -> Step:
        self.turns += 1
        return Step("again", is_done=self.turns == 2, reward=1e30)

    def snapshot(self) -> int:
        return self.turns

    async def resume(self, snapshot: int) -> None:
        self.turns = snapshot


async def test_reward_that_is_too_large_for_a_message_fails_its_sample() -> None:
    async with playing_session(ScriptedEngine(lambda context: "4"), Overpaid, keeps_turns=False) as playing:
        failed = await playing.made("g")
    assert isinstance(failed, m.SampleFailed)
    assert failed.boundary == "trajectory"


async def test_turns_beyond_the_limit_of_a_lease_are_not_kept(monkeypatch: Any) -> None:
    monkeypatch.setattr(turns_to_keep, "MAX_TURNS", 1)
    async with playing_session(searching(2), Search, Library().resources(), max_turns=9) as playing:
        playing.coordinator.lease("g")
        part, _ = await next_turns(playing)
        told: list[m.Message] = []
        while not told or not isinstance(told[-1], m.TrajectoryDone):
            told.append(await playing.coordinator.next(m.Message))
    assert len(part.turns) == 1
    assert not any(isinstance(message, m.TurnsDone) for message in told)


def _keeping(
    num_samples: int, wake: Callable[[], None] = lambda: None
) -> tuple[TurnsToKeep, list[tuple[Keeper, Transcript]]]:
    """Return the kept turns of a session with these samples, each with its transcript of a prompt."""
    shared = TurnsToKeep(make_spec(), Clock(), wake, lambda group, index, attempt: None)
    samples = [SampleTask("g", index, 1, 1, "train", 7, Task("a", None, {})) for index in range(num_samples)]
    keepers = [keeper for sample in samples if (keeper := shared.on_start(sample)) is not None]
    return shared, [(keeper, Transcript.begin([65])) for keeper in keepers]


def _num_parts(shared: TurnsToKeep) -> list[int]:
    """Return the number of parts in each message that is due now."""
    return [len(message.parts) for message, _ in shared.due_messages() if isinstance(message, m.TurnsDone)]


def _play(transcript: Transcript, num_turns: int) -> None:
    for _ in range(num_turns):
        transcript.add_turn(Generation([66], [-0.5], ((0, 1, 3),), "stop", None, "B"), 1.0)
        transcript.add_observation([67])


async def test_turns_written_after_the_last_reply_are_not_sent_with_it() -> None:
    _, [(keeper, transcript)] = _keeping(1)
    _play(transcript, 1)
    keeper.on_turn_finished(transcript, GuardedEnvironment(Search, Resources(9), 10.0))
    _play(transcript, 2)
    sent = keeper.part()
    assert sent is not None
    part, arrays = sent

    assert (part.num_tokens, len(part.turns), len(part.version_spans)) == (3, 1, 1)
    assert arrays[0] == np.array([65, 66, 67], "<i4").tobytes()


async def test_message_of_turns_has_at_most_8192_turns_and_spans() -> None:
    shared, keepers = _keeping(3)
    for keeper, transcript in keepers:
        _play(transcript, 3000)
        keeper.on_turn_finished(transcript, GuardedEnvironment(Search, Resources(9), 10.0))
    await until(lambda: not shared._is_bundling)
    assert _num_parts(shared) == [2, 1]
    assert sum(len(turn.calls) for turn in transcript.turns) == MAX_CALLS
