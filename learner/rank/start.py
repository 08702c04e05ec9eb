"""What a rank has before training begins: its place in a world of ranks, and the models where the run starts."""

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from learner.checkpoint.manifest import Checkpoint
from learner.disk.model_folder import find_named_model
from learner.models.network import network_settings
from learner.models.roles import Roles
from learner.models.world import join_world
from learner.rank.checkpoint import load_checkpoint
from learner.rank.load_roles import load_roles
from learner.rank.place import RankPlace
from learner.rank.solo_work import SoloWork
from protocol.errors import OperatorError, SettingsError
from protocol.node.small_model_files import SmallFiles, read_small_files, small_files_digest, write_small_files
from protocol.settings.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """A rank among the others, met."""

    place: RankPlace  # this rank's number, and where the world met
    solo: SoloWork  # for what rank 0 does alone while the others wait


@dataclass(frozen=True)
class Models:
    """The models of a run where it starts."""

    roles: Roles  # the models by what they are for
    step: int  # steps inside them: 0, or the checkpoint's
    version: int  # policy version of the weights
    are_saved: bool  # they came from a checkpoint of this very step


def join(place: RankPlace, limit_s: float, listener: socket.socket | None) -> World:
    """Return the world when all ranks have come; blocks at most limit_s, which is each later collective's limit too.

    listener: rank 0's, where the world meets.
    """
    store = join_world(place.rank, place.world_size, place.host, place.port, limit_s, listener)
    _log.info("met %d ranks at %s; network: %s", place.world_size, place.host, network_settings(os.environ))
    return World(place, SoloWork(store, place.rank, limit_s))


def find_models(settings: Settings, small_files: Mapping[str, SmallFiles], *, is_first: bool) -> dict[str, Path]:
    """Return this node's folder of each model, by the setting that names it.

    small_files: of the models on the command's node. is_first: rank 0, whose node needs the weights; other ranks get a
    folder with the small files. Raises: OperatorError when rank 0's node lacks a model, or has another one of its name.
    """
    if not is_first:
        return {setting: write_small_files(files) for setting, files in small_files.items()}
    named = {"policy.model": settings.policy.model, "critic.model": settings.critic.model}
    named["reference.model"] = settings.reference.model
    folders = {}
    for setting, files in small_files.items():
        try:
            folder = find_named_model(setting, str(named[setting]))
        except SettingsError as error:
            raise OperatorError(f"On rank 0's node {socket.gethostname()}: {error}") from None
        found = read_small_files(folder, with_code=settings.policy.trust_remote_code)
        if small_files_digest(found) != small_files_digest(files):
            raise OperatorError(
                f"{setting} = {folder} on rank 0's node {socket.gethostname()} is another model than on the command's "
                "node. Copy the model to rank 0's node, or place rank 0 on the command's node."
            )
        folders[setting] = folder
    return folders


def load(
    settings: Settings, folders: Mapping[str, Path], checkpoint: Checkpoint | None, tell: Callable[[str], None]
) -> Models:
    """Return the models of the run's checkpoint, or of its (warm-started) model. Collective.

    folders: as `find_models` returns them. tell: takes the rank's phase.
    """
    roles = load_roles(settings, folders, checkpoint, tell)
    step, version = (0, 0) if checkpoint is None else load_checkpoint(roles, checkpoint, tell)
    return Models(roles, step, version, are_saved=checkpoint is not None)


def use_threads(settings: Settings, num_ranks: int, num_others: int) -> None:
    """Take this rank's share of the cores, one left to each of the others that compute beside the ranks.

    More threads than cores make every parallel region wait for one that is not running.
    """
    share = ((os.cpu_count() or 1) - num_others) // num_ranks
    torch.set_num_threads(settings.learner.num_threads or max(1, share))
