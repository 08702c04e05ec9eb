"""Small services for the tests of this room: one that answers, one that ends at once."""

import sys
from pathlib import Path

from deploy.node.home import Home
from deploy.node.processes import launch
from protocol.node.home import ProcessRecord, write_cluster, write_secret
from tests.fakes.cluster_state import cluster_state
from tests.fakes.ports import free_port

ANSWERING = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Service(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

print("listening", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
"""
ENDING = "print('no index here')"


def started(home: Home, name: str, text: str, **environment: str) -> ProcessRecord:
    """Return the record of a service that runs this Python text, after it was started."""
    home.logs.mkdir(parents=True, exist_ok=True)
    write_secret(home.token_file, "0123456789abcdef0123")
    port = free_port()
    command, url = (sys.executable, "-c", text, str(port)), f"http://127.0.0.1:{port}/"
    return launch(name, command, "code", home.logs / f"{name}.log", environment, url, home.root)


def write_state(home: Home, *records: ProcessRecord) -> None:
    files = {"token_file": str(home.token_file), "ray_token_file": str(home.ray_token_file), "keys_dir": str(home.keys)}
    write_cluster(cluster_state(ray_address="127.0.0.1:1", node_ip="127.0.0.1", processes=list(records), **files))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
