"""A service is healthy when it says so; a retriever without GET /health when it answers a search of nothing."""

from pathlib import Path

import pytest

from deploy.node.home import Home
from deploy.node.processes import end, family, find, last_lines
from deploy.node.service_health import await_healthy, is_healthy
from protocol.errors import OperatorError
from tests.deploy.node.services import ENDING, started
from tests.fakes.waiting import wait_until

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
def test_service_is_healthy_when_it_says_so(tmp_path: Path, name: str, status: int, expected: bool) -> None:
    home = Home(tmp_path)
    record = started(home, name, SCRIPT.replace("GET)", f"{status})"))
    try:
        wait_until(lambda: last_lines(Path(record.log)).startswith("listening"))
        wait_until(lambda: is_healthy(record, home.token_file) == expected)
        other = record.model_copy(update={"ticks": (record.ticks or 0) - 1})
        assert (find(other), is_healthy(other, home.token_file)) == (None, False)
    finally:
        end(family(process for process in [find(record)] if process))
    assert not is_healthy(record, home.token_file)


def test_service_that_ends_at_its_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    record = started(Home(tmp_path), "retriever", ENDING)
    with pytest.raises(OperatorError, match=r"The retriever ended at its start: no index here \(log: "):
        await_healthy(record, Home(tmp_path).token_file, 20.0)


def test_service_that_never_answers_is_told_after_the_wait(tmp_path: Path) -> None:
    record = started(Home(tmp_path), "retriever", "import time; print('loading', flush=True); time.sleep(60)")
    try:
        with pytest.raises(OperatorError, match=r"was not healthy within 2 s: loading .* Raise --start-timeout-s"):
            await_healthy(record, Home(tmp_path).token_file, 2.0)
    finally:
        end(family(process for process in [find(record)] if process))
