"""A one-time code: what a node gets for it, how often, and who gets nothing."""

import io
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from deploy.cluster.invitation.code import Code, read_code
from deploy.cluster.invitation.give import Invitation, invite
from deploy.cluster.invitation.take import join_file_of
from deploy.cluster.join_file import read_join_file, write_join_file
from deploy.cluster.options.start_options import read_start_options
from deploy.node.home import Home, make_home
from protocol.errors import OperatorError
from protocol.node.home import ClusterState, write_cluster
from tests.fakes.ipv6 import needs_ipv6


@pytest.fixture
def join_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a head's join file; SLUICE_HOME is a joining node's from here on."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = Home(tmp_path / "head")
    make_home(home, is_joining=False)
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "node"))
    return write_join_file(home, "127.0.0.1:6379")


class Head:
    """An invitation that is answered until the test ends."""

    def __init__(self, join_file: Path, num_uses: int, host: str = "127.0.0.1") -> None:
        self.invitation = Invitation(host, join_file, num_uses)
        self.code = str(self.invitation.code)
        self.let_in: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            if (address := self.invitation.answer(0.02)) is not None:
                self.let_in.append(address)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.invitation.close()


@pytest.fixture
def head(join_file: Path) -> Iterator[Head]:
    serving = Head(join_file, 2)
    yield serving
    serving.close()


def test_node_gets_the_join_file_for_the_code_as_often_as_it_is_good(head: Head, join_file: Path) -> None:
    for _ in range(2):
        received = join_file_of(head.code)
        assert received != join_file
        assert received.read_bytes() == join_file.read_bytes()
        assert stat.S_IMODE(received.stat().st_mode) == 0o600
    with pytest.raises(OperatorError, match="refuses this code"):
        join_file_of(head.code)
    assert head.let_in == ["127.0.0.1", "127.0.0.1"]


@needs_ipv6
def test_node_gets_the_join_file_over_ipv6(join_file: Path) -> None:
    head = Head(join_file, 1, "::1")
    try:
        assert head.code.startswith("[::1]:")
        assert join_file_of(head.code).read_bytes() == join_file.read_bytes()
        with pytest.raises(OperatorError, match=r"--join \[::1\]:[0-9]+/... is no code, or not all of it"):
            join_file_of(head.code[:-1])
    finally:
        head.close()
    assert head.let_in == ["::1"]


def test_start_joins_by_a_code_where_the_join_file_says(head: Head) -> None:
    options = read_start_options(["--join", head.code])
    assert options.head == "127.0.0.1:6379"
    assert options.join is not None
    assert read_join_file(options.join).ray_address == "127.0.0.1:6379"


def test_code_with_another_token_is_refused_and_uses_nothing_up(head: Head) -> None:
    code = head.invitation.code
    with pytest.raises(OperatorError, match="refuses this code"):
        join_file_of(str(Code(code.address, code.public, b"another token 16")))
    assert head.invitation.num_left == 2


def test_head_with_another_key_is_told_nothing(head: Head) -> None:
    code = head.invitation.code
    with pytest.raises(OperatorError, match="does not answer this code"):
        join_file_of(str(Code(code.address, bytes(32), code.token)), answer_s=0.5)
    assert head.let_in == []


def test_neither_token_nor_secrets_travel_in_the_clear_nor_in_what_is_printed_of_a_code(head: Head) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:  # without CURVE
        socket.linger = 0
        socket.connect(f"tcp://{head.invitation.code.address}")
        socket.send(head.invitation.code.token)
        assert not socket.poll(300)
    assert head.let_in == []
    assert repr(head.invitation.code) == f"Code({head.invitation.code.address})"


def test_code_is_read_from_standard_input(head: Head, join_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{head.code}\n"))
    assert join_file_of("-").read_bytes() == join_file.read_bytes()


def test_standard_input_without_a_code_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(OperatorError, match="--join - reads a code from standard input, and there is none"):
        join_file_of("-")


def test_node_that_gave_up_before_it_was_in_uses_nothing_up(join_file: Path) -> None:
    invitation = Invitation("127.0.0.1", join_file, 1, receipt_s=0.5)
    with pytest.raises(OperatorError, match="does not answer this code"):
        join_file_of(str(invitation.code), answer_s=0.5)
    assert invitation.answer(5.0) is None  # too late for that node
    assert invitation.num_left == 1
    thread = threading.Thread(target=join_file_of, args=[str(invitation.code), 60.0])
    thread.start()
    addresses, deadline = [], time.monotonic() + 60.0
    while not addresses and time.monotonic() < deadline:
        addresses += [address for address in [invitation.answer(0.1)] if address is not None]
    assert (addresses, invitation.num_left) == (["127.0.0.1"], 0)
    thread.join()
    invitation.close()


def test_receipt_is_good_once(join_file: Path) -> None:
    invitation = Invitation("127.0.0.1", join_file, 2)
    code = invitation.code
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = z85.encode(code.public)
        socket.connect(f"tcp://{code.address}")
        answers = []
        for frames in ([code.token], [code.token, b"another receipt"], [code.token, None], [code.token, None]):
            socket.send_multipart([answers[0][2] if frame is None else frame for frame in frames])
            invitation.answer(10.0)
            answers.append(socket.recv_multipart())
    assert [answer[0] for answer in answers] == [b"taken", b"refused", b"noted", b"refused"]
    assert invitation.num_left == 1
    invitation.close()


@pytest.mark.parametrize("text", ["join", "/a/join", "h:1/" + "A" * 64, "host:1/short"])
def test_what_is_no_code_is_a_file(text: str) -> None:
    assert read_code(text) is None
    assert join_file_of(text) == Path(text)


@pytest.mark.parametrize(
    ("text", "number"), [("127.0.0.1:80/short", 5), ("1.2.3.4:5/" + "+" * 64, 64), ("...:80/" + "A" * 63, 63)]
)
def test_code_that_is_not_whole_is_no_file(text: str, number: int) -> None:
    assert read_code(text) is None
    with pytest.raises(OperatorError, match=rf"is no code, or not all of it: 64 .* here are {number} char") as raised:
        join_file_of(text)
    assert text not in str(raised.value)


def test_code_ends_in_words_when_the_head_has_no_join_file_any_more(join_file: Path) -> None:
    invitation = Invitation("127.0.0.1", join_file, 1)
    join_file.unlink()
    refused = []

    def join() -> None:
        with pytest.raises(OperatorError, match="refuses this code") as raised:
            join_file_of(str(invitation.code), 60.0)
        refused.append(raised.value)

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(OperatorError, match=r"invite: .*join: No such file or directory\. The code is good no more"):
        invitation.answer(60.0)
    invitation.close()
    thread.join()
    assert refused


def test_code_may_be_good_for_months(join_file: Path) -> None:
    invitation = Invitation("127.0.0.1", join_file, 1)
    thread = threading.Thread(target=join_file_of, args=[str(invitation.code), 60.0])
    thread.start()
    assert [invitation.answer(1e9), invitation.answer(1e9)] == [None, "127.0.0.1"]  # the token, then the receipt
    thread.join()
    invitation.close()


@pytest.mark.parametrize(
    ("arguments", "node_ip", "why"),
    [
        (["--uses", "0"], "10.0.0.1", "--uses 0 --minutes 15: expected both above 0"),
        ([], "127.0.0.1", r"no other node can join here \(127\.0\.0\.1\)"),
    ],
)
def test_invitation_that_cannot_be_is_refused(
    join_file: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], node_ip: str, why: str
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(join_file.parent))
    fields = dict.fromkeys(("retriever_url", "token_file", "ray_token_file", "keys_dir"), "")
    state = {"ray_address": f"{node_ip}:6379", "namespace": "sluice", "node_ip": node_ip, "reward_url": None}
    write_cluster(ClusterState.model_validate({**fields, **state, "processes": []}))
    with pytest.raises(OperatorError, match=why):
        invite(arguments)
