"""The command that stays in the foreground: which signals it hears."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cluster.foreground import ignored_signals, stay

_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    before = {number: signal.getsignal(number) for number in _HEARD}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_that_its_starter_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignored = ignored_signals()
    assert ignored == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ray does when it connects
    stay(ignored)  # returns: no cluster runs here
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) not in (signal.SIG_IGN, signal.SIG_DFL)
