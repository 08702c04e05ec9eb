"""Paths in the settings, made absolute once: the processes of a run have other working folders than its command."""

from pathlib import Path
from typing import TypeVar

from protocol.settings.data import HUB_PREFIX, DataEntry
from protocol.settings.roles.critic import CriticSettings
from protocol.settings.roles.reference import ReferenceSettings
from protocol.settings.rollout import environment_file
from protocol.settings.settings import Settings
from protocol.settings.tools.outside import McpServer

_FILE_SUFFIX = ".py"
_Role = TypeVar("_Role", CriticSettings, ReferenceSettings)


def with_absolute_paths(settings: Settings, folder: Path) -> Settings:
    """Return the settings with every path absolute: `~` is the user's home, a relative path stands in `folder`.

    A model stays as it is unless it is a folder there: it may be a name on the Hugging Face hub. Of an environment
    or algorithm only FILE.py:name and kind:FILE hold a path.
    """
    run, data, policy, learner = settings.run, settings.data, settings.policy, settings.learner
    warm = policy.warm_start
    resume = run.resume if run.resume in ("auto", "never") else _absolute(run.resume, folder)
    return settings.model_copy(
        update={
            "run": run.model_copy(update={"dir": _absolute(run.dir, folder), "resume": resume}),
            "data": data.model_copy(
                update={
                    "train": _absolute_data(data.train, folder),
                    "eval": data.eval and _absolute_data(data.eval, folder),
                }
            ),
            "eval": settings.eval.model_copy(
                update={
                    "sets": [
                        one.model_copy(update={"data": _absolute_rows(one.data, folder)}) for one in settings.eval.sets
                    ]
                }
            ),
            "policy": policy.model_copy(
                update={
                    "model": _absolute_model(policy.model, folder),
                    "warm_start": warm.model_copy(update={"data": warm.data and _absolute(warm.data, folder)}),
                }
            ),
            "critic": _with_absolute_model(settings.critic, folder),
            "reference": _with_absolute_model(settings.reference, folder),
            "rollout": settings.rollout.model_copy(
                update={"environment": _absolute_environment(settings.rollout.environment, folder)}
            ),
            "tools": settings.tools.model_copy(update={"mcp": _absolute_servers(settings.tools.mcp, folder)}),
            "learner": learner.model_copy(
                update={
                    name: given and _absolute_code(given, folder)
                    for name, given in (
                        ("advantage", learner.advantage),
                        ("loss", learner.loss),
                        ("correction", learner.correction),
                    )
                }
            ),
        }
    )


def _absolute_data(given: str | list[str | DataEntry], folder: Path) -> str | list[str | DataEntry]:
    """Return what names data sets, its paths absolute."""
    if isinstance(given, str):
        return _absolute_rows(given, folder)
    return [
        _absolute_rows(one, folder)
        if isinstance(one, str)
        else one.model_copy(update={"path": _absolute_rows(one.path, folder)})
        for one in given
    ]


def _absolute_rows(name: str, folder: Path) -> str:
    """Return it absolute, unless it is a name on the Hugging Face hub."""
    return name if name.startswith(HUB_PREFIX) else _absolute(name, folder)


def _absolute_servers(servers: list[McpServer], folder: Path) -> list[McpServer]:
    """Return MCP servers with the working folders of those that are commands."""
    return [
        server.model_copy(update={"folder": _absolute(server.folder or ".", folder)}) if server.command else server
        for server in servers
    ]


def _with_absolute_model(role: _Role, folder: Path) -> _Role:
    """Return a role's settings with its model absolute."""
    return role.model_copy(update={"model": _absolute_model(role.model, folder)})


def _absolute_model(name: str, folder: Path) -> str:
    absolute = _absolute(name, folder)
    return absolute if name and Path(absolute).is_dir() else name


def _absolute_environment(name: str, folder: Path) -> str:
    if (file := environment_file(name)) is not None:
        kind, path = file
        return f"{kind}:{_absolute(path, folder)}"
    return _absolute_code(name, folder)


def _absolute_code(name: str, folder: Path) -> str:
    where, colon, own = name.rpartition(":")
    return f"{_absolute(where, folder)}:{own}" if colon and where.endswith(_FILE_SUFFIX) else name


def _absolute(path: str, folder: Path) -> str:
    """Return the path from the root on, links kept; a path that is not set stays so."""
    return str(folder.resolve() / Path(path).expanduser()) if path else path
