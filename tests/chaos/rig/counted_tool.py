"""A tool that writes down each of its calls, as a process of its own: who was called how often is its word alone.

    python -m tests.chaos.rig.counted_tool FILE

prints its address. FILE gets a line for each call: number of the call, conversation, turn, process that called. The
reply is the line's first three.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple


class ToolCall(NamedTuple):
    """One call, as the tool has it."""

    number: int  # among all calls, from 0
    conversation: str  # which conversation called
    turn: int  # for which of its turns, from 1
    process: int  # id of the calling process

    @property
    def reply(self) -> str:
        """What the policy reads of it."""
        return f"[{self.conversation} {self.turn} {self.number}]"


def calls_in(lines: str) -> list[ToolCall]:
    """Return the calls that whole lines of the file tell of."""
    return [
        ToolCall(int(number), conversation, int(turn), int(process))
        for number, conversation, turn, process in (line.split() for line in lines.splitlines())
    ]


@contextmanager
def counted_tool(file: Path) -> Iterator[str]:
    """Yield the address of such a tool."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.rig.counted_tool", str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10.0)


def main() -> None:
    with Path(sys.argv[1]).open("w", encoding="utf-8", buffering=1) as file:
        number = 0

        class Tool(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                nonlocal number
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                call = ToolCall(number, asked["conversation"], asked["turn"], asked["process"])
                number += 1
                file.write(f"{call.number} {call.conversation} {call.turn} {call.process}\n")
                reply = json.dumps({"result": call.reply}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        # One call after the other: what it writes down is in the order in which it was called.
        server = HTTPServer(("127.0.0.1", 0), Tool)
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
