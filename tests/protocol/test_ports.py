"""On which ports our processes listen: in the range of SLUICE_PORTS, or on any."""

import pytest
import zmq

from protocol.addresses import PORTS_VARIABLE, listen, own_ports
from protocol.errors import OperatorError
from protocol.wire.channel import KeyPair, RouterChannel
from tests.fakes.ports import free_port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the one port of the range."""
    port = free_port()
    monkeypatch.setenv(PORTS_VARIABLE, f"{port}-{port}")
    return port


def test_any_port_will_do_without_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, "")
    assert own_ports() is None
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[1] > 0


def test_port_of_the_range_is_taken_and_a_full_range_is_said(port: int) -> None:
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[1] == port
        with pytest.raises(OperatorError) as refused:
            listen("127.0.0.1")
    assert str(refused.value) == (
        f"Each port of {port}-{port} on 127.0.0.1 is taken. Start the cluster with a larger range: "
        "sluice start --ports FIRST-LAST."
    )


def test_coordinator_listens_in_the_range(port: int) -> None:
    keys = KeyPair(*zmq.curve_keypair())
    channel = RouterChannel("127.0.0.1", keys, [keys.public])
    try:
        assert channel.address == f"tcp://127.0.0.1:{port}"
        with pytest.raises(OperatorError, match=f"Each port of {port}-{port} on 127.0.0.1 is taken"):
            RouterChannel("127.0.0.1", keys, [keys.public])
    finally:
        channel.close(linger_s=0)
