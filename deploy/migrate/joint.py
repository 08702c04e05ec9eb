"""Settings that follow from several options together: sizes of a step, data, ranks, reward services."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from deploy.migrate.convert import Draft
from protocol.settings.evaluation import EvalSettings
from protocol.settings.learner import LearnerSettings

_FILE = re.compile(r"^[./~]|\.(jsonl|json|parquet|csv)$")
_URL = "http://127.0.0.1:{}/score"
MODEL = "reward model "  # before a name, among the sources of rewards


def put_step(draft: Draft, prompts: int, size: int, samples: float, step: str, update: str, epochs: int = 1) -> None:
    """Write the prompts of a step and its number of updates.

    size: samples of a prompt; samples: those of one update; step and update: the options of both sizes.
    """
    updates = max(1, min(prompts, round(prompts * size / max(1, samples))))
    draft.put("learner.groups_per_step", prompts, step, why=f"{prompts} prompts, {prompts * size} samples")
    exact = prompts * size / max(1, samples)
    note = "" if updates == exact else f" (there {exact:g})"
    why = f"{samples:g} samples an update; updates a step: {updates}{note}, passes: {epochs}"
    draft.put("learner.num_mini_batches", updates, update, why=why)


def put_ranks(draft: Draft, nodes: int, gpus: int, *names: str) -> None:
    """Write the number of ranks. names: options of the nodes, and of the GPUs of a node."""
    draft.put("learner.num_ranks", nodes * gpus, *names)
    draft.put("placement.ranks.nodes", nodes, names[0])


def put_launched_ranks(draft: Draft, machines: str, processes: str) -> None:
    """Write the ranks that a launcher starts; processes: on all machines together, if it is said."""
    nodes = int(draft.number(machines, 1))
    put_ranks(draft, nodes, max(1, int(draft.number(processes, 1)) // max(1, nodes)), machines, processes)
    if processes not in draft.asked:
        draft.put("learner.num_ranks", draft.settings["learner.num_ranks"][0], why="the command does not say the GPUs")


def put_data(draft: Draft, setting: str, paths: Sequence[Any], *names: str, why: str = "") -> None:
    """Write one or several entries of data.train or data.eval."""
    if paths:
        draft.put(setting, list(paths) if len(paths) > 1 else paths[0], *names, why=why)


def put_whole_rows(draft: Draft, name: str, default: int) -> None:
    """List another trainer's longest row, given or its default: here a row is never cut."""
    given = draft.label(name) if name in draft.asked else f"{draft.trainer}'s default of {name}, {default}"
    draft.read.add(name)
    draft.always[given] = "Rows are trained whole; there a longer one is cut or left out"


def put_evaluated_rows(draft: Draft) -> None:
    """Write the rows of an evaluation, where a command does not say them."""
    if "data.eval" in draft.settings and "eval.num_prompts" not in draft.settings:
        draft.put("eval.num_prompts", EvalSettings().num_prompts, why="the first ones; there every row of data.eval")


def put_no_evaluation(draft: Draft, *names: str) -> None:
    """List the given options of evaluations."""
    for name in names:
        draft.read.add(name)
        if name in draft.asked:
            draft.always[draft.label(name)] = "There is no evaluation"


def put_rewards(draft: Draft, sources: Sequence[str], weights: Sequence[float], *names: str) -> None:
    """Write rewards.endpoints. sources: URLs, FILE.py[:NAME] with a function to serve, or MODEL and a model's name."""
    endpoints: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        url = re.sub(r"//[^/@]+@", "//", source)
        if url != source:
            draft.missing[f"password in {names[0]}"] = "Give it in the entry's headers_env"
        if not source.startswith("http"):
            url = _URL.format(9001 + number)
            model = source.removeprefix(MODEL)
            scorer = "--function" if model == source else "--scorer reward_model --model"
            draft.steps.append(f"sluice serve-reward {scorer} {shlex.quote(model)} --port {9001 + number}")
        endpoint = {"name": f"reward{number or ''}", "url": url}
        endpoints.append(endpoint | ({"weight": weights[number]} if len(weights) == len(sources) else {}))
    if endpoints:
        draft.put("rewards.endpoints", endpoints, *names)


def put_no_reward(draft: Draft) -> None:
    """List the service that a command without a reward still needs."""
    has_model = any("--reward-scorer" in step for step in draft.steps)
    if not has_model and not {"rewards.endpoints", "rollout.environment"} & set(draft.settings):
        draft.steps.append("serve a reward: the command does not say one (docs/do/rewards.md)")


def put_default_lack(draft: Draft, name: str, value: object, reason: str) -> None:
    """List another trainer's default that has no counterpart, where a command does not say the option."""
    if name not in draft.asked:
        draft.always[f"{draft.trainer}'s default of {name}, {value}"] = reason


def put_no_warm_up(draft: Draft, *names: str) -> None:
    """Remove the warm-up of transformers' schedule `constant`, which has none. names: its options."""
    for name in names:
        draft.read.add(name)
        if name in draft.asked:
            draft.always[draft.label(name)] = "The schedule constant has no warm-up there"
    for setting in ("learner.lr_warmup_ratio", "learner.lr_warmup_steps"):
        draft.settings.pop(setting, None)


def put_kept_checkpoints(draft: Draft, name: str) -> None:
    """List a trainer's default of the kept checkpoints, which is all of them."""
    if draft.settings.get("learner.checkpoint_every_steps", (0, ""))[0]:
        reason = f"{LearnerSettings().keep_checkpoints} are kept here: learner.keep_checkpoints takes a number"
        put_default_lack(draft, name, "all", reason)


def put_reward_model(draft: Draft, model: str, name: str) -> None:
    """List the command that serves a reward model."""
    draft.steps.append(f"sluice start --reward-scorer {shlex.quote(f'reward_model:{model}')}")
    draft.always[draft.label(name)] = "A reward model is a service: see Before the run"


def data_path(path: str, split: str) -> str:
    """Return a data set's name as data.train takes it."""
    return path if _FILE.search(path) else f"hf:{path}:{split}"
