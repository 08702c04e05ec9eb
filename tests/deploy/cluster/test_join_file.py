"""The join file: what a head tells, what a node takes of it and refuses."""

import stat
from pathlib import Path

import pytest

from deploy.cluster.checkout import Checkout, this_checkout
from deploy.cluster.join_file import is_reachable, read_join_file, take_secrets, write_join_file
from deploy.cluster.options.start_options import read_start_options
from deploy.node.home import Home, make_home
from protocol.errors import OperatorError, SettingsError


def home_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    folder.mkdir(mode=0o700, exist_ok=True)
    return Home(folder)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = home_of(tmp_path / "head", monkeypatch)
    make_home(home, is_joining=False)
    return home


def test_node_that_took_the_join_file_has_the_heads_secrets_for_its_eyes_alone(
    head: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_join_file(head, "10.0.0.1:6379")
    node = home_of(tmp_path / "node", monkeypatch)
    take_secrets(read_join_file(file), node)
    make_home(node, is_joining=True)
    assert [path.read_bytes() for path in node.secret_files] == [path.read_bytes() for path in head.secret_files]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (*node.secret_files, file)} == {0o600}
    take_secrets(read_join_file(file), node)  # a second start changes nothing


def test_secrets_of_another_cluster_are_not_overwritten(
    head: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = read_join_file(write_join_file(head, "10.0.0.1:6379"))
    other = home_of(tmp_path / "other", monkeypatch)
    make_home(other, is_joining=False)
    before = other.token_file.read_bytes()
    with pytest.raises(OperatorError, match=r"has secrets of another cluster \(token, ray_token, keys/"):
        take_secrets(told, other)
    assert other.token_file.read_bytes() == before


def test_join_file_cannot_name_files_elsewhere(head: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = read_join_file(write_join_file(head, "10.0.0.1:6379"))
    escaping = told.model_copy(update={"secrets": {**told.secrets, "../../authorized_keys": "x"}})
    with pytest.raises(SettingsError, match=r"holds .*authorized_keys.*, expected"):
        take_secrets(escaping, home_of(tmp_path / "node", monkeypatch))


def test_join_file_tells_what_the_head_has(head: Home) -> None:
    told = read_join_file(write_join_file(head, "10.0.0.1:6379"))
    assert Checkout(versions=told.versions, code=told.code) == this_checkout()


def test_file_that_others_can_read_is_refused(head: Home) -> None:
    file = write_join_file(head, "10.0.0.1:6379")
    file.chmod(0o640)
    with pytest.raises(SettingsError, match=f"can be read by others. Run: chmod 600 {file}"):
        read_join_file(file)


@pytest.mark.parametrize("text", ["", "{}", '{"ray_address": "a:1"}', "[]"])
def test_anything_else_is_no_join_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "join").write_text(text)
    (tmp_path / "join").chmod(0o600)
    with pytest.raises(SettingsError, match="is no join file"):
        read_join_file(tmp_path / "join")


def test_folder_in_place_of_the_join_file_is_refused_and_not_to_be_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match=f"--join {tmp_path} is a folder. Give the head's join file.$"):
        read_join_file(tmp_path)


def test_options_take_the_heads_address_from_the_file(head: Home) -> None:
    options = read_start_options(["--join", str(write_join_file(head, "127.0.0.1:7001"))])
    assert (options.head, options.node_ip) == ("127.0.0.1:7001", "127.0.0.1")
    assert "join" not in options.to_remember()


def test_address_beside_the_file_is_refused(head: Home) -> None:
    file = write_join_file(head, "127.0.0.1:7001")
    with pytest.raises(SettingsError, match="give --join or --address"):
        read_start_options(["--join", str(file), "--address", "127.0.0.1:7001"])


def test_missing_file_is_refused() -> None:
    with pytest.raises(SettingsError, match="--join /nowhere/join: No such file"):
        read_start_options(["--join", "/nowhere/join"])


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1", False), ("127.1.2.3", False), ("10.0.0.1", True)])
def test_head_on_loopback_is_in_reach_of_nobody(address: str, expected: bool) -> None:
    assert is_reachable(address) == expected
