"""The join file: what a head tells, what a node takes of it and refuses."""

import socket
import stat
from pathlib import Path

import pytest

from deploy.cluster.joining import (
    Checkout,
    check_clock,
    check_head_is_reachable,
    check_is_not_head,
    check_reachable_from_head,
    check_same_as_head,
    check_same_ip_family,
    install_secrets,
    is_reachable,
    read_join_file,
    this_checkout,
    write_join_file,
)
from deploy.cluster.options import read_start_options
from deploy.node.home import Home, make_home
from protocol.errors import OperatorError, SettingsError
from tests.fakes.cluster_state import cluster_state
from tests.fakes.ipv6 import needs_ipv6


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
    install_secrets(read_join_file(file), node)
    make_home(node, is_joining=True)
    assert [path.read_bytes() for path in node.secret_files] == [path.read_bytes() for path in head.secret_files]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (*node.secret_files, file)} == {0o600}
    install_secrets(read_join_file(file), node)  # a second start changes nothing


def test_secrets_of_another_cluster_are_not_overwritten(
    head: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = read_join_file(write_join_file(head, "10.0.0.1:6379"))
    other = home_of(tmp_path / "other", monkeypatch)
    make_home(other, is_joining=False)
    before = other.token_file.read_bytes()
    with pytest.raises(OperatorError, match=r"has secrets of another cluster \(token, ray_token, keys/"):
        install_secrets(told, other)
    assert other.token_file.read_bytes() == before


def test_join_file_cannot_name_files_elsewhere(head: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = read_join_file(write_join_file(head, "10.0.0.1:6379"))
    escaping = told.model_copy(update={"secrets": {**told.secrets, "../../authorized_keys": "x"}})
    with pytest.raises(SettingsError, match=r"holds .*authorized_keys.*, expected"):
        install_secrets(escaping, home_of(tmp_path / "node", monkeypatch))


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
    with pytest.raises(SettingsError, match="is not a join file"):
        read_join_file(tmp_path / "join")


def test_folder_in_place_of_the_join_file_is_refused_and_not_to_be_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match=f"--join {tmp_path} is a folder. Give the head's join file.$"):
        read_join_file(tmp_path)


def test_options_take_the_heads_address_from_the_file(head: Home) -> None:
    options = read_start_options(["--join", str(write_join_file(head, "127.0.0.1:7001"))])
    assert (options.address, options.node_ip) == ("127.0.0.1:7001", "127.0.0.1")
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


def test_same_checkout_and_versions_may_join() -> None:
    check_same_as_head(this_checkout(), "Ray")


def test_every_difference_is_named() -> None:
    here = this_checkout()
    there = here.model_copy(update={"versions": {**here.versions, "ray": "1.0", "jax": "2"}, "code": "0" * 16})
    with pytest.raises(
        OperatorError,
        match=rf"This node differs from the head, by the join file: ray {here.versions['ray']} here and 1\.0 "
        r"there; jax is not installed here and 2 there; the checkouts' Python files\. .* it again, and copy it\.$",
    ):
        check_same_as_head(there, "the join file", ", and copy it")


def test_head_that_answers_can_be_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        check_head_is_reachable(f"127.0.0.1:{head.getsockname()[1]}")


@needs_ipv6
def test_head_and_node_reach_each_other_over_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as head:
        check_head_is_reachable(f"[::1]:{head.getsockname()[1]}")
    check_reachable_from_head(
        "::1", lambda host, port: socket.create_connection((host, port), timeout=10.0).close() or ""
    )


def test_node_is_known_by_an_address_of_the_heads_kind() -> None:
    check_same_ip_family("10.0.0.2", "10.0.0.1")
    check_same_ip_family("fd00::2", "fd00::1")
    with pytest.raises(
        OperatorError, match=r"The head's address is fd00::1 and this node's is 10\.0\.0\.2: .*--node-ip"
    ):
        check_same_ip_family("10.0.0.2", "fd00::1")


def test_head_that_does_not_answer_is_named_with_what_to_look_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(OperatorError, match=rf"The head at 127\.0\.0\.1:{port} cannot be reached .*refused.*--node-ip"):
        check_head_is_reachable(f"127.0.0.1:{port}")


def test_head_is_asked_to_connect_to_an_open_port_of_this_node() -> None:
    def reach(host: str, port: int) -> str:
        socket.create_connection((host, port), timeout=10.0).close()
        return ""

    check_reachable_from_head("127.0.0.1", reach)


def test_node_that_the_head_cannot_reach_is_refused_with_the_heads_reason() -> None:
    with pytest.raises(OperatorError, match=r"cannot reach this node at 127\.0\.0\.1 \(timed out\).*--node-ip"):
        check_reachable_from_head("127.0.0.1", lambda host, port: "timed out")


@pytest.mark.parametrize("told", [1000.0, 996.0, 1009.0])
def test_clock_within_seconds_of_the_heads_will_do(told: float) -> None:
    times = iter([1000.0, 1004.0])  # the answer took 4 s
    check_clock(lambda: told, lambda: next(times))


@pytest.mark.parametrize(("told", "side"), [(990.0, "10 s ahead of"), (1012.0, "8 s behind")])
def test_clock_that_differs_is_refused_with_by_how_much(told: float, side: str) -> None:
    times = iter([1000.0, 1004.0])
    with pytest.raises(OperatorError, match=f"This node's clock is {side} the head's; 5 s are allowed"):
        check_clock(lambda: told, lambda: next(times))


def test_head_does_not_join_itself() -> None:
    known = cluster_state(ray_address="10.0.0.1:6379", node_ip="10.0.0.1")
    for address, other in ((None, known), ("10.0.0.1:6379", None), ("10.0.0.2:6379", known)):
        check_is_not_head(address, other)
    check_is_not_head("10.0.0.1:6379", known.model_copy(update={"options": {"address": "10.0.0.1:6379"}}))
    with pytest.raises(OperatorError, match=r"^This node is the head at 10\.0\.0\.1:6379: it does not join itself\."):
        check_is_not_head("10.0.0.1:6379", known)
