"""A home of its own for a rigged run, with keys and nothing of the user's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from protocol.node.home import Keys, write_secret
from protocol.wire.channel import KeyPair


@contextmanager
def rig_home(folder: Path) -> Iterator[Keys]:
    """Yield CURVE keys that lie in a home of their own, as deploy/start_cluster.sh makes them."""
    keys = Keys(KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair()))
    home = folder / "home"
    for name, pair in zip(("coordinator", "peer"), keys, strict=True):
        write_secret(home / "keys" / f"{name}.pub", pair.public.decode())
        write_secret(home / "keys" / f"{name}.sec", pair.secret.decode())
    before = os.environ.get("SLUICE_HOME")
    os.environ["SLUICE_HOME"] = str(home)
    try:
        yield keys
    finally:
        if before is None:
            del os.environ["SLUICE_HOME"]
        else:
            os.environ["SLUICE_HOME"] = before
