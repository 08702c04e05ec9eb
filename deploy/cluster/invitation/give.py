"""`python -m deploy.cluster invite`: the head answers nodes that have a one-time code, for so long and so many.

What a node gets is the join file, encrypted by CURVE under a key pair of this invitation alone. Whoever sends its
token gets it, with a receipt. The receipt's return uses the code up by one; where it does not come, as from a node that
gave up, the code is good again after 5 s.
"""

import argparse
import hmac
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from deploy.cluster.invitation.code import Code
from deploy.cluster.join_file import NAME, is_reachable
from deploy.cluster.known import is_head
from deploy.cluster.options.port_range import read_port_range
from deploy.node.home import this_home
from protocol import ports
from protocol.addresses import with_port
from protocol.errors import OperatorError, SettingsError
from protocol.node.home import ClusterState, read_cluster
from protocol.wire.channel import bind_to_own_port

TAKEN, NOTED, LATER, REFUSED = b"taken", b"noted", b"later", b"refused"
_RECEIPT_BYTES = 16
_LINGER_MS = 5_000
# Longer messages than a token are cut off with their sender.
_MAX_BYTES = 1024
_HANDSHAKE_MS = 5_000
_LONGEST_POLL_S = 3600.0  # ZeroMQ counts milliseconds in 32 bits
_RECEIPT_S = 5.0  # a node returns its receipt as soon as it has read the answer


class Invitation:
    """Listens from the time it is made until it is closed. code: what nodes are given.

    num_left: so many more nodes may come, those counted that were answered and have not returned their receipt.
    """

    def __init__(self, host: str, join_file: Path, num_uses: int, receipt_s: float = _RECEIPT_S) -> None:
        """join_file: read for each node that comes. receipt_s: a receipt that comes later is refused.

        Raises: OperatorError when no port of ours is free at `host`.
        """
        self.num_left = num_uses
        self._join_file = join_file
        self._receipt_s = receipt_s
        self._awaited: dict[bytes, float] = {}  # receipt -> time.monotonic() until which it counts
        public, secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.set(zmq.MAXMSGSIZE, _MAX_BYTES)
        self._socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.linger = _LINGER_MS
        self.code = Code(with_port(host, self._bind(host)), z85.decode(public), secrets.token_bytes(16))

    def answer(self, timeout_s: float) -> str | None:
        """Answer what comes next; returns a node's address when it has returned its receipt: it was let in.

        Blocks for timeout_s at most. Raises: OperatorError when there is no join file any more.
        """
        if not self._socket.poll(int(min(timeout_s, _LONGEST_POLL_S) * 1000)):
            return None
        token, *rest = frames = self._socket.recv_multipart(copy=False)
        if len(frames) > 2 or not hmac.compare_digest(token.bytes, self.code.token):
            self._socket.send(REFUSED)
            return None
        self._awaited = {each: until for each, until in self._awaited.items() if until > time.monotonic()}
        if rest:
            return self._noted(rest[0])
        self._hand_out()
        return None

    def _hand_out(self) -> None:
        if self.num_left <= len(self._awaited):
            self._socket.send(LATER if self.num_left else REFUSED)
            return
        try:
            told = self._join_file.read_bytes()
        except OSError as error:
            self._socket.send(REFUSED)
            raise OperatorError(f"invite: {self._join_file}: {error.strerror}. The code is good no more.") from None
        receipt = secrets.token_bytes(_RECEIPT_BYTES)
        self._awaited[receipt] = time.monotonic() + self._receipt_s
        self._socket.send_multipart([TAKEN, told, receipt])

    def _noted(self, returned: zmq.Frame) -> str | None:
        if self._awaited.pop(returned.bytes, None) is None:
            self._socket.send(REFUSED)
            return None
        self.num_left -= 1
        self._socket.send(NOTED)
        return str(returned.get("Peer-Address"))

    def close(self) -> None:
        """Send what is under way, for 5 s at most, and listen no more."""
        self._socket.close()
        self._context.term()

    def _bind(self, host: str) -> int:
        try:
            return bind_to_own_port(self._socket, host)
        except (OperatorError, zmq.ZMQError):
            self.close()
            raise OperatorError(
                f"invite: no port is free at {host}. End what listens there, or give more with --ports."
            ) from None


def invite(arguments: Sequence[str]) -> None:
    """Print the line for other nodes, and answer them until the code is used up or its time is over.

    Raises: OperatorError where this is no head that others can reach.
    """
    parser = argparse.ArgumentParser(prog="python -m deploy.cluster invite", allow_abbrev=False)
    parser.add_argument("--uses", type=int, default=1, help="so many nodes may join by it (default: 1)")
    parser.add_argument("--minutes", type=float, default=15.0, help="it is good for so long (default: 15)")
    given = parser.parse_args(arguments)
    if given.uses < 1 or not 0 < given.minutes < float("inf"):
        raise SettingsError(f"invite: --uses {given.uses} --minutes {given.minutes:g}: expected both above 0.")
    state, join_file = read_cluster(), this_home().root / NAME
    if not is_head(state) or not is_reachable(state.node_ip) or not join_file.is_file():
        raise OperatorError(
            f"invite: no other node can join here ({state.node_ip}). Give the command on the head, started with a "
            "--node-ip that others reach."
        )
    _listen_on_our_ports(state)
    invitation = Invitation(state.node_ip, join_file, given.uses)
    try:
        # Through a pipe from what shells have built in: as an argument everybody of that machine would see the code.
        print(f"On each other node: echo {invitation.code} | deploy/start_cluster.sh --join -")
        print(f"It lets in {given.uses}, for {given.minutes:g} minutes, while this command runs.", flush=True)
        until = time.monotonic() + given.minutes * 60
        while invitation.num_left and (left_s := until - time.monotonic()) > 0:
            if (address := invitation.answer(left_s)) is not None:
                print(f"{address} was let in; {invitation.num_left} more may come.", flush=True)
    except KeyboardInterrupt:
        print("The code is good no more.")
    finally:
        invitation.close()


def _listen_on_our_ports(state: ClusterState) -> None:
    """Have this command listen where the cluster's --ports let it."""
    given = state.options.get("ports")
    os.environ[ports.VARIABLE] = read_port_range(str(given)).ours if given else ""
