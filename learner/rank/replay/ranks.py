"""Kept steps trained again, by as many processes as the run had ranks, through the ranks' own code."""

import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import socket

import torch
import torch.distributed as dist

from learner.algorithms.by_name import algorithm_of
from learner.checkpoint.manifest import Checkpoint
from learner.checkpoint.sealed_files import no_report
from learner.disk.model_folder import find_named_model, weights_digest
from learner.disk.run_folder import MODELS
from learner.models.world import share_object
from learner.objectives.policy_gradient import StepOutcome
from learner.plan.needs import needs_reference
from learner.rank.process import RankPlace
from learner.rank.rank import objective_of
from learner.rank.replay.kept_steps import Objective, open_share, read_share, restore_random
from learner.rank.start import Models, join, load
from protocol.addresses import listen
from protocol.errors import NeighbourError, OperatorError, SettingsError
from protocol.one_line import describe_error
from protocol.settings.settings import Settings

_HOST = "127.0.0.1"
_POLL_S = 0.2


@dataclass(frozen=True)
class Job:
    """What is trained again, and from where."""

    steps: Sequence[Path]  # folders of the kept steps after the checkpoint, in order; figures are the last one's
    settings: Settings  # settings of these steps
    changed: Settings | None  # other settings of the last step; None: only these
    differences: dict[str, str]  # settings that differ, with their other value
    checkpoint: Checkpoint | None  # state before the first step; None: the models as the run began
    scratch: Path  # empty folder of all ranks


@dataclass(frozen=True)
class ReplayResult:
    """What came of the last step."""

    outcome: StepOutcome
    changed: StepOutcome | None  # with the other settings
    has_served_weights: bool | None  # the weights before the step equal those of the servers; None: not known
    notes: list[str]  # sentences for the user


def replay_on_ranks(job: Job) -> ReplayResult:
    """Return what comes of a job. Blocks until its ranks have ended.

    Raises: OperatorError as `load` does; NeighbourError when a rank ends without a result.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    world_size = job.settings.learner.num_ranks
    if world_size > 1 and torch.cuda.is_available():
        raise OperatorError(
            f"The run had {world_size} ranks, and a replay has no GPU for each. Hide them: put "
            "CUDA_VISIBLE_DEVICES= before the command."
        )
    os.environ["TQDM_DISABLE"] = "1"  # transformers shows a bar for each load
    with listen(_HOST) as listener:
        places = [RankPlace(n, world_size, _HOST, listener.getsockname()[1], world_size) for n in range(world_size)]
        ranks = [
            context.Process(target=_be_rank, args=(job, place, None if place.rank else listener, sender))
            for place in places
        ]
        for rank in ranks:
            rank.start()
    sender.close()
    try:
        answer = _first_answer(receiver, ranks)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.join()
    if isinstance(answer, ReplayResult):
        return answer
    raise answer


def _first_answer(receiver: Connection, ranks: Sequence[BaseProcess]) -> ReplayResult | Exception:
    """Return what rank 0 found, or the first error. A rank that failed leaves the others waiting for it."""
    while not receiver.poll(_POLL_S):
        if any(rank.exitcode for rank in ranks):
            codes = ", ".join(str(rank.exitcode) for rank in ranks)
            return NeighbourError("replay", f"its ranks ended without a result, with exit codes {codes}")
    try:
        answer: ReplayResult | Exception = receiver.recv()
    except EOFError:  # the last rank was killed
        return NeighbourError("replay", "its ranks ended without a result")
    return answer


def _be_rank(job: Job, place: RankPlace, listener: socket | None, sender: Connection) -> None:
    warnings.simplefilter("ignore")  # torch's, about DeepSpeed's calls
    try:
        with redirect_stdout(sys.stderr):  # DeepSpeed prints
            join(place, job.settings.learner.rank_timeout_s, listener)
            found = replay(job)
    except (OperatorError, NeighbourError) as error:
        sender.send(error)
        return
    except Exception as error:  # a user's loss may raise anything, and the sender's end says nothing of it
        traceback.print_exc()
        sender.send(NeighbourError(f"replay, rank {place.rank}", f"failed: {describe_error(error)}"))
        return
    if place.rank == 0:
        sender.send(found)


def replay(job: Job) -> ReplayResult:
    """Return what comes of a job on this rank of a world. Collective. Raises: OperatorError as `load` does."""
    notes: list[str] = []
    last, rank = job.steps[-1], dist.get_rank()
    run = last.parent.parent
    share = read_share(last, rank)
    torch.set_num_threads(share.num_threads)
    start = share_object(open_share(share)[0].incarnation)
    models, objective = _begin(job.settings, job.checkpoint, run, job.checkpoint, notes)
    for folder in job.steps[:-1]:
        _take_step(objective, folder, start)
    policy = models.roles.policy
    digest = policy.pushed_digest()
    is_served = digest == share.weights_digest if share.weights_digest else None
    if job.changed is None:
        return ReplayResult(_take_step(objective, last, start), None, is_served, notes)
    models.roles.save_state(job.scratch / "state")
    before = Checkpoint(job.scratch, models.step, models.version, "", "", digest, policy.digest_form)
    outcome = _take_step(objective, last, start)
    _, other = _begin(job.changed, before, run, job.checkpoint, notes)
    return ReplayResult(outcome, _take_step(other, last, start), is_served, notes)


def _begin(
    settings: Settings, checkpoint: Checkpoint | None, run: Path, of_run: Checkpoint | None, notes: list[str]
) -> tuple[Models, Objective]:
    """Return the models of a checkpoint and their objective. Collective. of_run: checkpoint of the run, a folder."""
    without = settings.data.model_copy(update={"eval": None})  # held-out rows change no loss
    settings = settings.model_copy(update={"data": without})
    named = {"critic.model": settings.critic.model, "reference.model": settings.reference.model}
    folders = {setting: find_named_model(setting, name) for setting, name in named.items() if name}
    folders["policy.model"] = _first_model(settings, run, of_run)
    models = load(settings, folders, checkpoint, no_report, notes.append)
    return models, objective_of(settings, models.roles, folders["policy.model"])


def _first_model(settings: Settings, run: Path, of_run: Checkpoint | None) -> Path:
    """Return the folder of the model that the run began with, or one of its shape where its weights are not read.

    Raises: SettingsError where it is missing, OperatorError where it has other weights than the run began with.
    """
    state = run if of_run is None else of_run.path / "state"
    reads_reference = needs_reference(settings) and not settings.reference.model and not (state / "reference").is_dir()
    needs_critic = algorithm_of(settings.learner).advantage.needs_critic
    reads_critic = needs_critic and not settings.critic.model and not (state / "critic").is_dir()
    is_read = of_run is None or bool(settings.policy.lora.rank) or reads_reference or reads_critic
    try:
        folder = find_named_model("policy.model", settings.policy.model)
    except SettingsError:
        if of_run is None or is_read:
            raise
        return of_run.path / "model"  # another machine: the checkpoint has the model's shape
    path, key = run / MODELS, "policy.model, its weights"
    began_with = json.loads(path.read_bytes()).get(key) if is_read and path.exists() else None
    if began_with is not None and weights_digest(folder) != began_with:
        raise OperatorError(
            f"policy.model = {settings.policy.model} has other weights now than the run began with ({path}), and the "
            "replay reads them. Put the run's first model there."
        )
    return folder


def _take_step(objective: Objective, folder: Path, start: int) -> StepOutcome:
    """Take a kept step. start: the start of the run whose steps are replayed."""
    share = read_share(folder, dist.get_rank())
    batch, trajectories = open_share(share)
    if batch.incarnation != start:
        raise OperatorError(
            f"{folder} is of start {batch.incarnation} of the run, and the replayed step of start {start}. Name a step "
            "with a checkpoint between the two."
        )
    restore_random(share)
    return objective.take_step(batch, trajectories, share.policy_version)
