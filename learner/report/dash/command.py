"""`sluice dash [RUNS_DIR]`: a live page of runs, from their folders alone. Nothing of a run waits for it.

Exit status: 130 after Ctrl-C; 1 with one sentence.
"""

import argparse
import secrets
import sqlite3
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from learner.report.dash.api import TokenGate, make_dash
from learner.report.dash.runs import Runs
from protocol.http.bearer import MIN_TOKEN_LENGTH, read_token
from protocol.http.listen import LOOPBACK, PortTakenError, add_listen_options, address_of, bind
from protocol.http.service import make_server, run_service, serve_app
from protocol.node.home import sluice_home

_PORT = 8700
DEMO = Path(__file__).with_name("demo.zip")  # what the page reads of the folder of a quick start
_INDEX_EVERY_S = 1.0
_END_S = 6.0  # for answers that are under way


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sluice dash", description="A live page of your runs. It reads their folders and never disturbs them."
    )
    parser.add_argument(
        "folder", type=Path, metavar="RUNS_DIR", nargs="?", default=Path("runs"), help="folder of runs, or one run"
    )
    parser.add_argument("--demo", action="store_true", help="show a quick start that was recorded")
    add_listen_options(parser, _PORT)
    return run_service(parser, arguments, _serve)


class PageOfRun:
    """A page of one run, on loopback, served by a thread of the run's command."""

    def __init__(self, folder: Path) -> None:
        try:
            listener = bind("sluice run", LOOPBACK[0], _PORT)
        except PortTakenError:  # the page of another run
            listener = bind("sluice run", LOOPBACK[0], 0)
        listener.listen()
        token = secrets.token_urlsafe(MIN_TOKEN_LENGTH)
        self.link = f"{address_of(listener)}/?token={token}"
        self._server = make_server(_make_page(Runs(folder, sluice_home() / "dash"), token))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_END_S)


def _serve(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="sluice-demo-") as scratch:
        if options.demo:
            zipfile.ZipFile(DEMO).extractall(scratch)
            options.folder = Path(scratch)
        _serve_folder(options)


def _serve_folder(options: argparse.Namespace) -> None:
    runs = Runs(options.folder, sluice_home() / "dash")
    token = read_token(options.token_file) if options.token_file else secrets.token_urlsafe(MIN_TOKEN_LENGTH)
    listener = bind("sluice dash", options.host, options.port)
    link = address_of(listener) if options.token_file else f"{address_of(listener)}/?token={token}"
    if options.host not in LOOPBACK:
        print("The page is not encrypted: an address that is not this machine's own shows it to the network.")
    introduction = f"Runs of {options.folder.resolve()}. Open {link}\nCtrl-C ends the page, not the runs. Listening"
    serve_app(_make_page(runs, token), listener, None, introduction)


def _make_page(runs: Runs, token: str) -> TokenGate:
    """Return the page's application, and begin to index."""
    for run in runs.all():
        run.summary()  # a large run is read before the first view of it
    threading.Thread(target=_index, args=(runs,), daemon=True).start()
    return TokenGate(make_dash(runs), token)


def _index(runs: Runs) -> None:
    """Index what runs record, newest run first."""
    problems: dict[str, str] = {}  # of a run: said once
    while True:
        for run in runs.all():
            try:
                run.samples.update()
            except (OSError, sqlite3.Error) as error:  # a folder that goes away, a full disk
                if problems.get(run.name) != str(error):
                    problems[run.name] = str(error)
                    print(f"sluice dash: {run.name} is not indexed: {error!r}", flush=True)
        time.sleep(_INDEX_EVERY_S)
