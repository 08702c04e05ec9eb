"""One borrower at a time: a second one is let in once the first has ended, or hears that it has not. Without Ray."""

import asyncio

from deploy.fleet.processes import StandbyPool


class Borrower:
    """An actor as the pool sees it: its call `live` comes back when it has ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    @property
    def live(self) -> "Borrower":
        return self

    async def remote(self) -> None:
        await self.ended.wait()


def test_a_second_borrower_is_kept_out_while_the_first_lives() -> None:
    async def ask() -> tuple[bool, bool, bool, bool]:
        pool, first, second = StandbyPool(), Borrower(), Borrower()
        let_in = await pool.admit(first, 0.0), await pool.admit(second, 0.0), await pool.admit(first, 0.0)
        return (*let_in, pool.is_lending)

    assert asyncio.run(ask()) == (True, False, True, True)


def test_a_borrower_that_waits_is_let_in_when_the_one_before_has_ended() -> None:
    async def ask() -> tuple[bool, bool]:
        pool, first, second = StandbyPool(), Borrower(), Borrower()
        await pool.admit(first, 0.0)
        waiting = asyncio.create_task(pool.admit(second, 60.0))
        first.ended.set()
        return await waiting, await pool.admit(first, 0.0)

    assert asyncio.run(ask()) == (True, False)


def test_of_two_that_wait_one_is_let_in() -> None:
    async def ask() -> list[bool]:
        pool, first = StandbyPool(), Borrower()
        await pool.admit(first, 0.0)
        waiting = [asyncio.create_task(pool.admit(Borrower(), 0.5)) for _ in range(2)]
        first.ended.set()
        return sorted([await each for each in waiting])

    assert asyncio.run(ask()) == [False, True]
