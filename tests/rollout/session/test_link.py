"""Messages of a session to its coordinator: when a Hello is repeated, and counts that do not fit."""

from protocol.wire import messages as m
from protocol.wire.codec import Decoder
from rollout.session.outbox import Failure, Key, Outbox
from rollout.session.session import CoordinatorLink
from tests.fakes.clock import Clock
from tests.fakes.rollout_fakes import make_spec


class Wire:
    """A channel that records its messages and brings none."""

    is_connected = True

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self._decoder: Decoder[m.Message] = Decoder(m.FromServer)

    async def send(self, frames: list[bytes]) -> bool:
        self.sent.append(self._decoder.decode(frames)[0])
        return True

    async def receive(self, timeout_s: float) -> list[bytes] | None:
        return None


async def test_hello_is_repeated_after_5_s_without_an_answer() -> None:
    clock, wire = Clock(0.0), Wire()
    link = CoordinatorLink("s0", make_spec(), wire, clock)
    sent = []
    for clock.now in (0.0, 4.9, 5.0, 9.9, 10.0):
        await link.greet(3)
        sent.append(len(wire.sent))

    assert sent == [1, 1, 2, 2, 3]


async def test_link_has_greeted_once_a_hello_was_sent() -> None:
    link = CoordinatorLink("s0", make_spec(), Wire(), Clock())
    before = link.has_greeted
    await link.greet(None)

    assert (before, link.has_greeted) == (False, True)


async def test_count_beyond_a_messages_limit_is_sent_as_the_limit() -> None:
    clock, wire, outbox = Clock(), Wire(), Outbox()
    link = CoordinatorLink("s0", make_spec(), wire, clock)
    link.is_welcome, link._heard_at = True, clock.now
    outbox.put(Failure(Key("g", 0, 1, 1), "engine", "died", num_model_tokens=1 << 40))
    await link.send_finished(outbox)

    (failed,) = wire.sent
    assert isinstance(failed, m.SampleFailed)
    assert failed.num_model_tokens == 2**31 - 1
