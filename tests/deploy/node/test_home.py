"""SLUICE_HOME: private folders, keys that fit together, secrets that are kept."""

import os
import socket
import stat
from pathlib import Path

import pytest
import zmq

from deploy.node.home import Home, check_not_used_elsewhere, exclusive, make_home, mark_home_used
from protocol.errors import OperatorError
from protocol.node.home import load_keys


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Home(tmp_path / "home")


def test_home_is_readable_by_its_owner_alone(home: Home) -> None:
    make_home(home, is_joining=False)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [home.root, *home.root.rglob("*")]}
    assert modes == {
        **{"home": 0o700, "keys": 0o700, "logs": 0o700, "token": 0o600, "ray_token": 0o600},
        **{"coordinator.pub": 0o600, "coordinator.sec": 0o600, "peer.pub": 0o600, "peer.sec": 0o600},
    }


def test_keys_are_pairs(home: Home) -> None:
    make_home(home, is_joining=False)
    keys = load_keys()
    for pair in keys:
        assert zmq.curve_public(pair.secret) == pair.public
    assert keys.coordinator != keys.peer


def test_second_start_keeps_keys_and_tokens(home: Home) -> None:
    make_home(home, is_joining=False)
    before = {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()}
    make_home(home, is_joining=False)
    assert {path: path.read_bytes() for path in home.root.rglob("*") if path.is_file()} == before


def test_joining_node_without_the_heads_secrets_is_told_what_to_copy(home: Home) -> None:
    with pytest.raises(OperatorError, match=r"needs the head's secrets: token, ray_token, keys/coordinator.pub"):
        make_home(home, is_joining=True)


def test_key_that_others_can_read_is_refused(home: Home) -> None:
    make_home(home, is_joining=False)
    (home.keys / "peer.sec").chmod(0o644)
    with pytest.raises(OperatorError, match=r"can be read by others. Run: chmod 600"):
        load_keys()


def test_folder_of_ray_is_short_enough_for_a_socket(home: Home) -> None:
    socket_path = "/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    assert len("/tmp/") + len(home.ray_folder.name) + len(socket_path) <= 107  # noqa: S108  # a length, not a file


def test_link_in_place_of_the_ray_folder_is_refused(home: Home, tmp_path: Path) -> None:
    home.ray_folder.symlink_to(tmp_path)
    with pytest.raises(OperatorError, match="belongs to another user"):
        make_home(home, is_joining=False)


def test_second_start_at_the_same_time_is_refused(home: Home) -> None:
    with exclusive(home), pytest.raises(OperatorError, match="is under way"), exclusive(home):
        pass


def test_home_that_cannot_be_locked_is_refused(home: Home) -> None:
    make_home(home, is_joining=False)
    (home.root / ".lock").symlink_to(home.root / "nowhere" / "lock")
    with pytest.raises(OperatorError, match="cannot be locked"), exclusive(home):
        pass


def test_home_of_a_node_that_runs_on_another_machine_is_refused(home: Home) -> None:
    make_home(home, is_joining=False)
    check_not_used_elsewhere(home)
    held = mark_home_used(home)
    assert held is not None
    check_not_used_elsewhere(home)  # this machine's own
    assert mark_home_used(home) is None
    (home.root / "node.lock").write_text("another-boot/4026531836\ngpu-box-2")
    with pytest.raises(OperatorError) as caught:
        check_not_used_elsewhere(home)
    os.close(held)
    assert str(caught.value) == (
        f"{home.root} is the SLUICE_HOME of a running node on gpu-box-2. Each node needs its own: set SLUICE_HOME to "
        f"another folder here, such as {home.root}/{socket.gethostname()}."
    )
    check_not_used_elsewhere(home)  # it has ended
