"""SLUICE_HOME: private folders, CURVE keys and tokens."""

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.disk.lock import file_lock, try_lock
from protocol.errors import OperatorError
from protocol.node.home import sluice_home, write_secret
from protocol.node.identity import machine_name, process_space

_LOCK = "node.lock"


@dataclass(frozen=True)
class Home:
    """Files of this node's cluster."""

    root: Path  # SLUICE_HOME, absolute

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def ray_token_file(self) -> Path:
        return self.root / "ray_token"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def secret_files(self) -> list[Path]:
        """Files that are equal on all nodes of a cluster."""
        pairs = [self.keys / f"{name}.{kind}" for name in ("coordinator", "peer") for kind in ("pub", "sec")]
        return [self.token_file, self.ray_token_file, *pairs]

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def quickstart(self) -> Path:
        return self.root / "quickstart"

    @property
    def ray_folder(self) -> Path:
        """Folder of Ray's sockets. Not in SLUICE_HOME: the path of a unix socket has at most 107 characters.

        Ray uses a folder inside it, because Ray opens its own folder to every user of the machine.
        """
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / f"sluice-{os.getuid()}-{digest}"


def this_home() -> Home:
    return Home(sluice_home().absolute())


def make_home(home: Home, is_joining: bool) -> None:
    """Make missing folders, keys and tokens.

    Raises: OperatorError when a folder belongs to another user, or when a joining node lacks the head's secrets.
    """
    for folder in (home.root, home.keys, home.logs, home.ray_folder):
        _make_private(folder)
    missing = [path for path in home.secret_files if not path.is_file()]
    if is_joining and missing:
        names = ", ".join(str(path.relative_to(home.root)) for path in missing)
        raise OperatorError(
            f"To join a cluster this node needs the head's secrets: {names} in {home.root}. "
            "Give the head's join file: sluice start --join FILE."
        )
    for path in (home.token_file, home.ray_token_file):
        if not path.is_file():
            write_secret(path, secrets.token_hex(32))
    for name in ("coordinator", "peer"):
        # Always a whole pair: a public key without its secret locks every peer out.
        if not (home.keys / f"{name}.sec").is_file() or not (home.keys / f"{name}.pub").is_file():
            public, secret = zmq.curve_keypair()
            write_secret(home.keys / f"{name}.pub", public.decode())
            write_secret(home.keys / f"{name}.sec", secret.decode())


@contextmanager
def exclusive(home: Home) -> Iterator[None]:
    """Hold the lock of starting and stopping.

    Raises: OperatorError when another start or stop is under way, or the disk has no locks.
    """
    _make_private(home.root)
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(home.root / ".lock"))
        except BlockingIOError:
            raise OperatorError(
                f"Another start or stop of the cluster in {home.root} is under way. Wait for it."
            ) from None
        except OSError as error:
            raise OperatorError(
                f"{home.root} cannot be locked ({error.strerror}). Set SLUICE_HOME to a folder on another disk."
            ) from None
        yield


def mark_home_used(home: Home) -> int | None:
    """Mark this home as used by this machine, until this process ends or closes the returned descriptor.

    Returns the descriptor of a locked file; None when another process has the mark, or the disk has no locks.
    """
    descriptor = None
    try:
        descriptor = os.open(home.root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(descriptor):
            os.close(descriptor)
            return None
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{process_space()}\n{machine_name()}".encode())
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def check_not_used_elsewhere(home: Home) -> None:
    """Raise OperatorError when a cluster's node of another machine or container uses this home.

    Two nodes would overwrite each other's addresses and process ids, and a stop would end the wrong processes.
    """
    path = home.root / _LOCK
    if not path.is_file():
        return
    with path.open("r", encoding="utf-8") as file:
        if try_lock(file.fileno(), is_shared=True):
            return
        processes, _, machine = file.read().partition("\n")
    if processes != process_space():
        raise OperatorError(
            f"{home.root} is the SLUICE_HOME of a running node on {machine}. Each node needs its own: set "
            f"SLUICE_HOME to another folder here, such as {home.root}/{machine_name()}."
        )


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
        # In a shared temporary folder another user may have made this name first.
        if folder.is_symlink() or found.st_uid != os.getuid():
            raise OperatorError(
                f"{folder} belongs to another user or is a link. Set SLUICE_HOME to a folder of your own."
            )
        folder.chmod(0o700)
    except OSError as error:
        raise OperatorError(
            f"{folder} cannot be made ({error.strerror}). Set SLUICE_HOME to a folder of your own."
        ) from None
