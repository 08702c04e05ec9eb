"""The join file: all that another node needs to become part of a head's cluster, in one file for its owner's eyes.

A start writes it into SLUICE_HOME of a head that others can reach. It holds secrets: whoever has it is in. It travels
as such files do, by scp or on a disk that the nodes share.
"""

from pathlib import Path

from pydantic import ValidationError

from deploy.cluster.checkout import Checkout, this_checkout
from deploy.node.home import Home
from protocol.errors import OperatorError, SettingsError
from protocol.node.home import write_secret

NAME = "join"


class JoinFile(Checkout):
    """What a head tells the nodes that join it."""

    ray_address: str  # HOST:PORT of its Ray
    secrets: dict[str, str]  # path below SLUICE_HOME -> what the file holds


def write_join_file(home: Home, ray_address: str) -> Path:
    """Write the join file of this head; returns its path."""
    secrets = {str(path.relative_to(home.root)): path.read_text("utf-8") for path in home.secret_files}
    told = JoinFile(ray_address=ray_address, secrets=secrets, **this_checkout().model_dump())
    write_secret(home.root / NAME, told.model_dump_json(indent=1))
    return home.root / NAME


def read_join_file(path: Path) -> JoinFile:
    """Return what a head told. Raises: SettingsError when the file is none, or when others may read it."""
    if path.is_dir():  # a variable of the shell that is empty names the working folder
        raise SettingsError(f"start_cluster: --join {path} is a folder. Give the head's join file.")
    try:
        if path.stat().st_mode & 0o077:
            raise SettingsError(f"start_cluster: --join {path} can be read by others. Run: chmod 600 {path}")
        return JoinFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"start_cluster: --join {path}: {error.strerror}. Give the head's join file.") from None
    except ValidationError:
        raise SettingsError(
            f"start_cluster: --join {path} is no join file. Give the one in the head's SLUICE_HOME, by this version."
        ) from None


def take_secrets(told: JoinFile, home: Home) -> None:
    """Put the head's secrets into this node's home. Raises: OperatorError when other ones are there already."""
    names = {str(path.relative_to(home.root)) for path in home.secret_files}
    if set(told.secrets) != names:
        raise SettingsError(f"start_cluster: the join file holds {sorted(told.secrets)}, expected {sorted(names)}.")
    others = [
        name
        for name, text in told.secrets.items()
        if (home.root / name).is_file() and (home.root / name).read_text("utf-8") != text
    ]
    if others:
        raise OperatorError(
            f"{home.root} has secrets of another cluster ({', '.join(others)}). Set SLUICE_HOME to another folder, or "
            "stop that cluster and remove them."
        )
    for name, text in told.secrets.items():
        write_secret(home.root / name, text)


def is_reachable(node_ip: str) -> bool:
    """Return whether other machines can reach a head at this address."""
    return not node_ip.startswith("127.")
