"""One watched service: what its watcher knows of a process that it has just started."""

import shutil
from pathlib import Path

import psutil

from deploy.node.home import Home
from deploy.node.processes import end, family, find
from deploy.node.service_health import is_healthy
from deploy.node.watched_service import WatchedService
from protocol.node.home import ProcessRecord
from tests.deploy.node.services import ANSWERING, started
from tests.fakes.waiting import wait_until


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


def test_service_whose_log_cannot_be_written_is_started_once_it_can(tmp_path: Path) -> None:
    home = Home(tmp_path)
    service = WatchedService(started(home, "reward", ANSWERING), home.token_file, lambda _: None, 120.0)
    try:
        psutil.Process(service.record.pid).kill()
        wait_until(service.look)
        shutil.rmtree(home.logs)
        service.start()
        assert "cannot be written" in service.trouble
        home.logs.mkdir()
        wait_until(service.look)
        service.start()
        wait_until(lambda: is_healthy(service.record, home.token_file))
    finally:
        end_of(service.record)


def test_new_process_is_told_again_until_it_could_be_written_down(tmp_path: Path) -> None:
    home, told = Home(tmp_path), list[int]()

    def write_down(record: ProcessRecord) -> None:
        told.append(record.pid)
        if len(told) < 3:
            raise OSError(28, "No space left on device")

    service = WatchedService(started(home, "reward", ANSWERING), home.token_file, write_down, 120.0)
    try:
        psutil.Process(service.record.pid).kill()
        wait_until(service.look)
        service.start()
        for _ in range(4):
            assert not service.look()
        assert told == [service.record.pid] * 3
    finally:
        end_of(service.record)


def test_service_is_watched_on_while_the_clusters_token_is_being_made_anew(tmp_path: Path) -> None:
    home = Home(tmp_path)
    service = WatchedService(started(home, "reward", ANSWERING), home.token_file, lambda _: None, 120.0)
    token = home.token_file.read_text()
    try:
        home.token_file.unlink()
        assert not service.look()
        assert f"token file {home.token_file}: cannot be read" in service.trouble
        home.token_file.write_text(token)
        wait_until(lambda: not service.look() and service.trouble == "")
    finally:
        end_of(service.record)
