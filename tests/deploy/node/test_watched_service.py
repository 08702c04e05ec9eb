"""One watched service: what its watcher knows of a process that it has just started."""

from pathlib import Path

import psutil

from deploy.node.home import Home
from deploy.node.processes import end, family, find
from deploy.node.service_health import is_healthy
from deploy.node.watched_service import WatchedService
from protocol.node.home import ProcessRecord
from tests.deploy.node.services import ANSWERING, started, wait_until


def end_of(record: ProcessRecord) -> None:
    end(family([process] if (process := find(record)) is not None else []))


def test_service_is_seen_well_as_soon_as_it_answers_again(tmp_path: Path) -> None:
    """One that is taken for never well waits ever longer before its next start, up to a minute."""
    home = Home(tmp_path)
    service = WatchedService(started(home, "reward", ANSWERING), home.token_file, lambda _: None, 120.0)
    try:
        for _ in range(3):
            wait_until(lambda: is_healthy(service.record, home.token_file))
            service.look()
            assert service.trouble == ""
            psutil.Process(service.record.pid).kill()
            wait_until(service.look)
            service.start()
    finally:
        end_of(service.record)
