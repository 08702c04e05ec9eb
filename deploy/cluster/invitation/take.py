"""A node that was given a one-time code gets the join file for it from the head."""

import getpass
import re
import sys
import time
from pathlib import Path

import zmq
from zmq.utils import z85

from deploy.cluster.invitation.code import Code, read_code
from deploy.cluster.invitation.give import LATER, NOTED, TAKEN
from deploy.node.home import this_home
from protocol.errors import OperatorError
from protocol.node.home import write_secret

STDIN = "-"
_NAME = "join_received"
_ANSWER_S = 15.0
_AGAIN_S = 0.5
_BEGUN = re.compile(r"(?:[0-9.]+|\[[0-9a-f:]+\]):[0-9]+/")
_NUM_CHARACTERS = 64


def join_file_of(given: str, answer_s: float = _ANSWER_S) -> Path:
    """Return the path of the join file that --join names: as it is, or of one that the head gives for this code.

    given: `-` stands for a line of standard input, which no list of processes shows. Blocks until that came.
    Raises: OperatorError when the head does not know the code, or does not answer.
    """
    if given == STDIN:
        given = _line_of_stdin()
    code = read_code(given)
    if code is None:
        _check_is_no_code(given)
        return Path(given)
    path = this_home().root / _NAME
    write_secret(path, _asked(code, answer_s).decode())
    return path


def _line_of_stdin() -> str:
    try:
        line = getpass.getpass("Code: ") if sys.stdin.isatty() else sys.stdin.readline()
    except EOFError:
        line = ""
    if not (line := line.strip()):
        raise OperatorError("start_cluster: --join - reads a code from standard input, and there is none.")
    return line


def _check_is_no_code(given: str) -> None:
    if (begun := _BEGUN.match(given)) is not None and not Path(given).exists():
        raise OperatorError(
            f"start_cluster: --join {begun[0]}... is no code, or not all of it: {_NUM_CHARACTERS} letters, digits, - "
            f"and _ follow the slash; here are {len(given) - begun.end()} characters. Copy it from the line that "
            "python -m deploy.cluster invite printed on the head."
        )


def _asked(code: Code, answer_s: float) -> bytes:
    """Return what the head tells for the code, once it has taken the receipt back."""
    deadline = time.monotonic() + answer_s
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = z85.encode(code.public)
        socket.linger = 0
        socket.ipv6 = "[" in code.address
        socket.connect(f"tcp://{code.address}")
        while (answer := _ask(socket, [code.token], code, deadline)) == [LATER]:
            time.sleep(_AGAIN_S)  # another node has been answered, and may have given up
        if len(answer) == 3 and answer[0] == TAKEN:
            _, told, receipt = answer
            if _ask(socket, [code.token, receipt], code, deadline) == [NOTED]:
                return told
    raise OperatorError(
        f"The head at {code.address} refuses this code. python -m deploy.cluster invite on the head makes another."
    )


def _ask(socket: zmq.Socket[bytes], frames: list[bytes], code: Code, deadline: float) -> list[bytes]:
    socket.send_multipart(frames)
    if not socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        raise OperatorError(
            f"The head at {code.address} does not answer this code. It is used up, over, or mistyped, or "
            "a firewall stands between. python -m deploy.cluster invite on the head makes another."
        )
    return socket.recv_multipart()
