"""One watched service: its health, and its restarts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.node.home import Home
from deploy.node.processes import end, family, find, last_lines
from deploy.node.service import Restarts, WatchedService, await_healthy, is_healthy
from protocol.errors import OperatorError
from protocol.node.home import ProcessRecord
from tests.deploy.node.services import ANSWERING, ENDING, started
from tests.fakes.waiting import wait_until


def end_of(record: ProcessRecord) -> None:
    end(family([process] if (process := find(record)) is not None else []))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def service(home: Home) -> Iterator[WatchedService]:
    watched = WatchedService(started(home, "reward", ANSWERING), home.token_file, lambda _: None, 120.0)
    yield watched
    end_of(watched.record)


def test_service_is_seen_well_as_soon_as_it_answers_again(home: Home, service: WatchedService) -> None:
    """One that is taken for never well waits ever longer before its next start, up to a minute."""
    for _ in range(3):
        wait_until(lambda: is_healthy(service.record, home.token_file))
        service.poll()
        assert service.trouble == ""
        psutil.Process(service.record.pid).kill()
        wait_until(service.poll)
        service.start()


def test_service_whose_log_cannot_be_written_is_started_once_it_can(home: Home, service: WatchedService) -> None:
    psutil.Process(service.record.pid).kill()
    wait_until(service.poll)
    shutil.rmtree(home.logs)
    service.start()
    assert "cannot be written" in service.trouble
    home.logs.mkdir()
    wait_until(service.poll)
    service.start()
    wait_until(lambda: is_healthy(service.record, home.token_file))


def test_new_process_is_told_again_until_it_could_be_written_down(service: WatchedService) -> None:
    told = list[int]()

    def write_down(record: ProcessRecord) -> None:
        told.append(record.pid)
        if len(told) < 3:
            raise OSError(28, "No space left on device")

    service._on_start = write_down
    psutil.Process(service.record.pid).kill()
    wait_until(service.poll)
    service.start()
    for _ in range(4):
        assert not service.poll()
    assert told == [service.record.pid] * 3


def test_service_is_watched_on_while_the_clusters_token_is_being_made_anew(home: Home, service: WatchedService) -> None:
    token = home.token_file.read_text()
    home.token_file.unlink()
    assert not service.poll()
    assert f"token file {home.token_file}: cannot be read" in service.trouble
    home.token_file.write_text(token)
    wait_until(lambda: not service.poll() and service.trouble == "")


@pytest.mark.parametrize(
    ("ends", "last_delays"),  # ends: (number, seconds lived, whether it was healthy) in order
    [
        ([(5, 60.0, True)], [0.0] * 5),  # it ran long: at once
        ([(12, 1.0, False)], [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]),
        ([(2000, 59.0, True)], [4.0] * 3),  # it is worth another try soon
        ([(9, 1.0, False), (1, 61.0, True), (1, 1.0, True)], [32.0, 0.0, 0.25]),  # a long life resets the count
        ([(9, 10.0, True), (8, 1.0, False)], [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0, 16.0]),
    ],
)
def test_restart_waits_longer_after_each_quick_end(
    ends: list[tuple[int, float, bool]], last_delays: list[float]
) -> None:
    restarts = Restarts()
    delays = [restarts.next_delay(lived_s, healthy) for number, lived_s, healthy in ends for _ in range(number)]
    assert delays[-len(last_delays) :] == last_delays


SCRIPT = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Service(BaseHTTPRequestHandler):
    def answer(self, status):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(status)
        self.end_headers()

    def do_GET(self):
        self.answer(GET)

    def do_POST(self):
        self.answer(200 if self.headers["authorization"] == "Bearer 0123456789abcdef0123" else 401)

print("listening", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
"""


@pytest.mark.parametrize(
    ("name", "status", "expected"),
    [
        ("reward", 200, True),
        ("reward", 503, False),
        ("reward", 404, False),
        ("retriever", 404, True),
        ("retriever", 501, True),
        ("retriever", 500, False),
    ],
)
def test_service_is_healthy_when_it_says_so(home: Home, name: str, status: int, expected: bool) -> None:
    record = started(home, name, SCRIPT.replace("GET)", f"{status})"))
    try:
        wait_until(lambda: last_lines(Path(record.log)).startswith("listening"))
        wait_until(lambda: is_healthy(record, home.token_file) == expected)
        other = record.model_copy(update={"ticks": (record.ticks or 0) - 1})
        assert (find(other), is_healthy(other, home.token_file)) == (None, False)
    finally:
        end_of(record)
    assert not is_healthy(record, home.token_file)


def test_service_that_ends_at_its_start_is_told_with_the_end_of_its_log(home: Home) -> None:
    record = started(home, "retriever", ENDING)
    with pytest.raises(OperatorError, match=r"The retriever ended at its start: no index here \(log: "):
        await_healthy(record, home.token_file, 20.0)


def test_service_that_never_answers_is_told_after_the_wait(home: Home) -> None:
    record = started(home, "retriever", "import time; print('loading', flush=True); time.sleep(60)")
    try:
        with pytest.raises(OperatorError, match=r"was not healthy within 2 s: loading .* Raise --start-timeout-s"):
            await_healthy(record, home.token_file, 2.0)
    finally:
        end_of(record)
