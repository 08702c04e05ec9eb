"""A rank before training: it meets the other ranks, and loads the models where the run starts."""

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from learner.algorithms.by_name import has_critic
from learner.checkpoint.manifest import Checkpoint
from learner.checkpoint.sealed_files import Report, no_report
from learner.disk.model_folder import find_named_model, shape_digest, weights_digest
from learner.disk.run_folder import MODELS
from learner.models.critic import CriticEngine
from learner.models.origin import FIRST_REFERENCE
from learner.models.policy import PolicyEngine
from learner.models.reference import BaseReference, ReferenceModel, check_refresh
from learner.models.reward_model import find_unserved, load_reward_model
from learner.models.roles import Roles, load_policy
from learner.models.settings import critic_settings, policy_settings, reference_settings
from learner.models.start_check import check_model
from learner.models.world import first_problem, join_world, share_object
from learner.objectives.warm_start import warm_start
from learner.plan.needs import is_reference_kept, is_reference_the_base, is_trained, needs_reference
from learner.rank.checkpoint import load_checkpoint
from learner.rank.process import RankPlace
from learner.rank.same_tokens import check_same_tokens
from learner.rank.solo_work import SoloWork
from protocol.disk.files import replace_file
from protocol.errors import OperatorError, SettingsError
from protocol.node.small_model_files import SmallFiles, read_small_files, small_files_digest, write_small_files
from protocol.settings.paths import user_files
from protocol.settings.run_spec import digests_of
from protocol.settings.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """A rank that has met the others."""

    place: RankPlace  # this rank's number, and the address of rank 0
    solo: SoloWork  # runner of rank 0's own work while the others wait


@dataclass(frozen=True)
class Models:
    """The models of a run where it starts."""

    roles: Roles
    step: int  # last step inside them: 0, or the checkpoint's
    version: int  # policy version of the weights
    are_saved: bool  # a checkpoint of this step exists


def join(place: RankPlace, limit_s: float, listener: socket.socket | None) -> World:
    """Return the world when all ranks have joined. limit_s: longest wait, here and in each later collective.

    listener: rank 0's socket, where the ranks meet.
    """
    store = join_world(place.rank, place.world_size, place.host, place.port, limit_s, listener)
    _log.info("met %d ranks at %s", place.world_size, place.host)
    return World(place, SoloWork(store, place.rank, limit_s))


def find_models(settings: Settings, small_files: Mapping[str, SmallFiles], *, is_first: bool) -> dict[str, Path]:
    """Return this node's folder of each model, by the setting that names it.

    small_files: files of the models on the command's node. is_first: true on rank 0, which needs the weights; others
    get a folder with the small files. Raises: OperatorError when rank 0's node lacks a model or has another one.
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


def record_models(run: Path, folders: Mapping[str, Path]) -> None:
    """Write the digests of the models that a run begins with into its folder. Reads all weights: a minute for 100 GB.

    folders: this node's folder of each model, by the setting that names it.
    """
    digests = {}
    for setting, folder in folders.items():
        digests[f"{setting}, its weights"] = weights_digest(folder)
        digests[f"{setting}, its other files"] = small_files_digest(read_small_files(folder, with_code=True))
    replace_file(run / MODELS, json.dumps(digests, indent=1).encode())


def load(
    settings: Settings,
    folders: Mapping[str, Path],
    checkpoint: Checkpoint | None,
    report: Report,
    note: Report = no_report,
) -> Models:
    """Return the models of the run's checkpoint, or of its (warm-started) model. Collective.

    folders: as `find_models` returns them. report: takes the rank's phase. note: takes sentences for the user.
    """
    learner = settings.learner
    check_same_code(digests_of(user_files("", learner.advantage, learner.loss, learner.correction)))
    roles = load_roles(settings, folders, checkpoint, report)
    if settings.objective == "reward_model" and (text := find_unserved(folders["policy.model"])) is not None:
        note(text)
    step, version = (0, 0) if checkpoint is None else load_checkpoint(roles, checkpoint, note)
    return Models(roles, step, version, are_saved=checkpoint is not None)


def check_same_code(files: Mapping[str, str]) -> None:
    """Raise OperatorError on every rank when one has other files than rank 0: their gradients would not add up.

    files: digest of each of the user's files that this rank trains by. Collective.
    """
    problem = None
    for path, _ in sorted(share_object(dict(files)).items() ^ files.items()):
        problem = f"{path} on node {socket.gethostname()} is not the file of rank 0's node. Copy it to all nodes."
    if (problem := first_problem(problem)) is not None:
        raise OperatorError(problem)


def use_threads(settings: Settings, num_ranks: int) -> None:
    """Use this rank's share of its node's cores. num_ranks: on the node.

    Rollout servers there use the same cores: an engine waits often, and a core that is kept for it stands idle then.
    """
    share = (os.cpu_count() or 1) // num_ranks
    torch.set_num_threads(settings.learner.num_threads or max(1, share))


def load_roles(settings: Settings, folders: Mapping[str, Path], checkpoint: Checkpoint | None, report: Report) -> Roles:
    """Return the models as they are before training; `load_checkpoint` replaces the weights of a resumed run.

    folders: this node's folder of each model, by the setting that names it. report: takes the rank's phase. Collective.
    """
    trust = settings.policy.trust_remote_code
    for setting in folders.keys() - {"policy.model"}:
        check_same_tokens(setting, folders[setting], folders["policy.model"], trust_remote_code=trust)
    model = _first_policy(settings, folders["policy.model"], checkpoint, report)
    report("loading the policy")
    of_policy = policy_settings(settings, model)
    if not is_trained(settings) and checkpoint is None:
        roles = Roles(load_policy(replace(of_policy, is_trained=False), name=settings.policy.model))
    else:
        load = load_reward_model if settings.objective == "reward_model" else load_policy
        policy = load(of_policy, name=settings.policy.model)
        critic = _critic(settings, folders.get("critic.model", model), policy.vocab_size, report)
        of_reference = folders.get("reference.model", model)
        if needs_reference(settings) and settings.reference.refresh_every_steps:
            check_refresh(of_reference, model, trust_remote_code=trust)
        reference = _reference(settings, of_reference, policy, checkpoint, report)
        report("reading the weights of the base and the reference")
        is_first = dist.get_rank() == 0
        origin = _origin(settings, model, of_reference, reference, checkpoint) if is_first else {}
        in_use = [name for name, role in (("critic", critic), ("reference", reference)) if role is not None]
        origin |= _shapes(settings, folders, in_use) if is_first else {}
        roles = Roles(policy, critic, reference, origin=origin)
    report("the models are ready")
    return roles


def _origin(
    settings: Settings,
    base: Path,
    of_reference: Path,
    reference: ReferenceModel | BaseReference | None,
    checkpoint: Checkpoint | None,
) -> dict[str, str]:
    """Return the facts that a resume must share: the adapters and their base, and the reference of the KL."""
    origin, lora = {"adapters": "none"}, settings.policy.lora
    if lora.rank:
        alpha, targets = lora.alpha or float(lora.rank), " ".join(sorted(lora.targets)) or "all"
        origin["adapters"] = f"rank {lora.rank}, alpha {alpha:g}, targets {targets}"
        origin["base"] = weights_digest(base)
    if isinstance(reference, ReferenceModel):
        origin["reference_model"] = settings.reference.model
    if reference is not None and not _has_reference(checkpoint):
        origin["reference"] = weights_digest(of_reference)
        if not settings.reference.model:
            origin[FIRST_REFERENCE] = origin["reference"]
    elif checkpoint is None and settings.policy.warm_start.data:
        origin[FIRST_REFERENCE] = weights_digest(base)  # `record_models` writes that of policy.model
    return origin


def _shapes(settings: Settings, folders: Mapping[str, Path], roles: Sequence[str]) -> dict[str, str]:
    """Return the configurations of the roles, which a resume must share too. Without a folder: the policy's."""
    own = {role: folders.get(f"{role}.model", folders["policy.model"]) for role in roles}
    with_code = settings.policy.trust_remote_code
    return {f"{role}_shape": shape_digest(folder, with_code=with_code) for role, folder in own.items()}


def _first_policy(settings: Settings, model: Path, checkpoint: Checkpoint | None, report: Report) -> Path:
    """Return the policy's folder at the start. A checkpoint replaces the warm start, except for a missing reference."""
    is_in_checkpoint = checkpoint is not None and (
        not needs_reference(settings) or settings.reference.model or _has_reference(checkpoint)
    )
    if settings.policy.warm_start.data is None or is_in_checkpoint:
        return model
    return warm_start(settings, model, report)


def _critic(settings: Settings, model: Path, vocab_size: int, report: Report) -> CriticEngine | None:
    if not has_critic(settings):
        return None
    report("loading the critic")
    of_critic = critic_settings(settings, model)
    check_model(of_critic, "critic", name=settings.critic.model or settings.policy.model)
    critic = CriticEngine(of_critic)
    _check_size("critic.model", settings.critic.model, critic.vocab_size, vocab_size)
    return critic


def _check_size(setting: str, name: str | None, found: int, needed: int) -> None:
    """Raise OperatorError when a role's model has no embedding for some token of the policy."""
    if found < needed:
        raise OperatorError(
            f"{setting} = {name} has {found} tokens and the policy {needed}. "
            f"Use a model with the policy's tokenizer, or leave {setting} empty."
        )


def _reference(
    settings: Settings, model: Path, policy: PolicyEngine, checkpoint: Checkpoint | None, report: Report
) -> ReferenceModel | BaseReference | None:
    if not needs_reference(settings):
        return None
    if is_reference_the_base(settings) and not _has_reference(checkpoint):
        return BaseReference(policy)
    report("loading the reference")
    named = settings.reference.model
    of_reference = reference_settings(settings, model)
    method = check_model(of_reference, "language model", name=named or settings.policy.model)
    reference = ReferenceModel(
        of_reference,
        is_offloaded=settings.reference.offload,
        is_kept=is_reference_kept(settings) or _has_reference(checkpoint),
    )
    reference.scored.use(method)
    _check_size("reference.model", named, reference.vocab_size, policy.vocab_size)
    return reference


def _has_reference(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and (checkpoint.path / "state" / "reference").is_dir()
