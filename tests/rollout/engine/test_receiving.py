"""What waiting for a push's last bucket ends with."""

import asyncio

import pytest

from rollout.engine.receiving import until_received


async def test_it_asks_again_until_all_has_come() -> None:
    answers = iter([False, False, True])

    async def ask() -> bool:
        return next(answers)

    await until_received(ask, lambda: True)
    assert list(answers) == []


async def test_what_ends_the_receiving_is_raised() -> None:
    async def ask() -> bool:
        raise ValueError("lost a peer")

    with pytest.raises(ValueError, match="lost a peer"):
        await until_received(ask, lambda: True)


@pytest.mark.parametrize("is_dead", [True, False])
async def test_an_answer_that_never_comes_is_waited_for_as_long_as_the_engine_lives(is_dead: bool) -> None:
    answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(until_received(lambda: answer, lambda: not is_dead))
    await asyncio.wait({waiting}, timeout=0.5)
    was_done = waiting.done()
    waiting.cancel()
    (ended,) = await asyncio.gather(waiting, return_exceptions=True)

    assert was_done is is_dead
    assert isinstance(ended, ConnectionError if is_dead else asyncio.CancelledError)
    assert answer.cancelled()
