"""The tokens that a session counts: in a file that outlives it, told before the result, and told until answered."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.errors import NeighbourError
from protocol.wire import messages as m
from rollout.session import token_tally
from rollout.session.token_tally import LeftTally, TokenTally
from tests.fakes.rollout_fakes import make_spec
from tests.rollout.session.scene import Scene, playing, until

ROW = m.TokenCount("e0-a", 1, 2, 3)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def tally(tmp_path: Path) -> TokenTally:
    return TokenTally(tmp_path / "s0-2-x", 2)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with playing() as scene:
        await scene.coordinator.welcome()
        yield scene


def left_by(tally: TokenTally, path: Path) -> LeftTally:
    """Return what another session reads when this one was killed: the file as it is, without the lock."""
    copy = path.with_name("left")
    copy.write_bytes(path.read_bytes())
    return LeftTally(copy)


def test_file_of_a_killed_session_has_every_count_and_how_its_attempts_ended(tally: TokenTally, home: Path) -> None:
    tally.begin("e0-a/1/3", ROW)
    tally.begin("e0-a/2/3", m.TokenCount("e0-a", 2, 2, 3, num_resumed=9, resumed_from=1))
    for request, number in (("e0-a/1/3/0-1", 5), ("e0-a/1/3/1-7", 2), ("e0-a/2/3/0-2", 4), ("probe-12", 1)):
        tally.count(request, number)
    tally.end("e0-a/1/3", "failed")
    tally.end("e0-a/1/3", "stopped")
    left = left_by(tally, home / "s0-2-x")
    assert left.rows == [
        m.TokenCount("-", 0, 2, 0, 1, "died"),
        m.TokenCount("e0-a", 1, 2, 3, 7, "failed"),
        m.TokenCount("e0-a", 2, 2, 3, 4, "died", 9, 1),
    ]
    assert left.num_generated == 12


def test_forgotten_attempts_stay_in_the_sum_and_their_slots_are_used_again(tally: TokenTally, home: Path) -> None:
    size = (home / "s0-2-x").stat().st_size
    for number in range(500):
        tally.begin(f"e0-a/0/{number}", ROW)
        tally.count(f"e0-a/0/{number}/0-0", 2)
        tally.forget(f"e0-a/0/{number}")
    assert (home / "s0-2-x").stat().st_size == size
    left = left_by(tally, home / "s0-2-x")
    assert (len(left.rows), left.num_generated) == (1, 1000)


def test_file_grows_with_the_attempts_in_flight(tally: TokenTally, home: Path) -> None:
    for number in range(300):
        tally.begin(f"e0-a/{number}/1", m.TokenCount("e0-a", number, 1, 1))
        tally.count(f"e0-a/{number}/1/0-0", number)
    left = left_by(tally, home / "s0-2-x")
    assert {row.sample_index: row.num_tokens for row in left.rows if row.attempt} == dict(enumerate(range(300)))


def test_counts_stay_in_memory_where_no_file_can_be_made(home: Path) -> None:
    (home / "file").write_text("")
    tally = TokenTally(home / "file" / "s0", 1)
    for number in range(100):
        tally.begin(f"a/{number}/1", ROW)
    tally.count("a/99/1/0-0", 3)
    assert tally.row("a/99/1").num_tokens == 3
    tally.close()


def test_file_of_a_session_that_goes_on_is_left_alone(tally: TokenTally, home: Path) -> None:
    with pytest.raises(BlockingIOError):
        LeftTally(home / "s0-2-x")
    for key in tally:
        tally.forget(key)
    tally.close()
    assert not (home / "s0-2-x").exists()


def test_file_has_its_name_only_when_it_is_locked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session would take an unlocked one for that of a killed session, and remove it."""
    seen = []
    real = token_tally.try_lock

    def lock(descriptor: int) -> bool:
        seen.append((home / "s1-2-x").exists())
        return real(descriptor)

    monkeypatch.setattr(token_tally, "try_lock", lock)
    TokenTally(home / "s1-2-x", 2)
    assert (seen, (home / "s1-2-x").exists()) == ([False], True)


async def test_last_count_of_a_sample_is_told_before_its_result_and_until_it_is_answered(scene: Scene) -> None:
    scene.coordinator.lease("e0-a")
    await scene.coordinator.next(m.TrajectoryDone)
    done = m.TokenCount("e0-a", 0, 1, 1, 1, "done")
    told = [message for message in scene.coordinator.received if isinstance(message, m.TokensCounted)]
    assert done in told[-1].rows
    assert told[-1].num_generated == 1
    again = await scene.coordinator.next(m.TokensCounted)
    assert again.rows == [done]
    scene.coordinator.send(m.Done(**scene.coordinator.stamp, request=again.request))
    await until(lambda: "e0-a/0/1" not in scene.session._books._sent)


async def test_answer_to_an_earlier_count_does_not_end_a_later_one_that_was_lost(scene: Scene) -> None:
    books = scene.session._books
    scene.scorer.delay_s = 60.0
    scene.coordinator.lease("e0-a")
    await until(lambda: len(scene.scorer.requests) == 1)
    books._told_at = float("-inf")
    (earlier,) = [message for message, _ in books.due_messages() if isinstance(message, m.TokensCounted)]
    assert earlier.rows == [m.TokenCount("e0-a", 0, 1, 1, 1)]
    books._tally.count("e0-a/0/1/0-1", 4)
    books._tally.end("e0-a/0/1", "failed")
    books._told_at = float("-inf")
    (later,) = [message for message, _ in books.due_messages() if isinstance(message, m.TokensCounted)]
    assert later.rows == [m.TokenCount("e0-a", 0, 1, 1, 5, "failed")]
    books.on_message(m.Done(**scene.coordinator.stamp, request=earlier.request))
    assert "e0-a/0/1" in list(books._tally)
    books.on_message(m.Done(**scene.coordinator.stamp, request=later.request))
    assert "e0-a/0/1" not in list(books._tally)


async def test_tokens_of_failed_and_stopped_samples_are_told_with_how_they_ended(scene: Scene) -> None:
    scene.scorer.reward = NeighbourError("reward:fake", "is down")
    scene.coordinator.lease("e0-a")
    await scene.coordinator.next(m.SampleFailed)
    told = [message for message in scene.coordinator.received if isinstance(message, m.TokensCounted)]
    assert told[-1].rows == [m.TokenCount("e0-a", 0, 1, 1, 1, "failed")]
    scene.scorer.delay_s = 60.0
    scene.coordinator.lease("e0-b", number=2)
    await until(lambda: len(scene.scorer.requests) == 2)
    scene.task.cancel()
    await until(scene.task.done)
    scene.session._books.finish()
    rows = {row.group: row for message, _ in scene.session._books.due_messages() for row in rows_of(message)}
    assert rows["e0-b"] == m.TokenCount("e0-b", 0, 1, 1, 1, "stopped")


async def test_next_session_of_the_run_tells_what_a_killed_one_left(home: Path) -> None:
    folder = home / "tokens" / make_spec().run_id
    killed = TokenTally(folder / "s9-1-killed", 1)
    killed.begin("e0-a/0/1", m.TokenCount("e0-a", 0, 1, 1))
    killed.count("e0-a/0/1/0-0", 11)
    killed._words.release()  # as the end of its process does: the lock is free, and nothing is removed
    killed._memory.close()
    assert killed._descriptor is not None
    os.close(killed._descriptor)
    async with playing() as scene:
        await scene.coordinator.welcome()
        told = await scene.coordinator.next(m.TokensCounted)
        assert (told.session, told.num_generated) == ("s9-1-killed", 11)
        assert m.TokenCount("e0-a", 0, 1, 1, 11, "died") in told.rows
        assert (folder / "s9-1-killed").exists()
        scene.coordinator.send(m.Done(**scene.coordinator.stamp, request=told.request))
        await until(lambda: not (folder / "s9-1-killed").exists())


def rows_of(message: m.Message) -> list[m.TokenCount]:
    assert isinstance(message, m.TokensCounted)
    return message.rows
