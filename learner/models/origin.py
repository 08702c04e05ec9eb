"""The models that a run began with, as facts in its checkpoints: a resume compares them with its own.

A checkpoint of adapters, or of a run with a KL, is of use only with the same base and the same reference.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from learner.disk.run_folder import MODELS
from protocol.errors import OperatorError

ORIGIN = "origin.json"
LOST = "reference_lost"
FIRST_REFERENCE = "reference_first"
"""The weights of a reference that is the policy as the run began: a run may turn its KL on later."""

# Fact -> what differs, and what to change.
_DIFFERENCES = {
    "adapters": "policy.lora is {now}, and the checkpoint's is {then}: the policy would be another one. Set rank, "
    "alpha and targets back",
    "base": "the weights in the folder of policy.model are not those to which the checkpoint's adapters belong. Put "
    "the weights back",
    "reference_model": "reference.model is {now}, and the checkpoint holds the reference of a run with {then}. Set it "
    "back",
    "reference": "the weights of the reference or teacher are not those of the run's earlier steps. Put the weights "
    "back into the folder of reference.model (or of policy.model, if that is empty)",
    FIRST_REFERENCE: "the weights in the folder of policy.model, or their warm start, are not those that the run began "
    "with, and they would be its reference. Put weights, policy.warm_start and its file back, or name the folder that "
    "holds the first weights in reference.model",
    "reference_shape": "config.json or code in the folder of reference.model is not what the run's earlier steps had: "
    "with the same weights it is another model. Put it back (policy.model's, if reference.model is empty)",
    "critic_shape": "config.json or code in the folder of critic.model is not what the run's earlier steps had: with "
    "the same weights it is another model. Put it back (policy.model's, if critic.model is empty)",
}


def check_origin(folder: Path, now: Mapping[str, str]) -> str | None:
    """Return how the models of a run differ from those of a checkpoint's state in `folder`, or None.

    now: facts of the run. Facts that one of the two does not have are not compared.
    """
    then, run = _read(folder / ORIGIN), folder.parent.parent.parent
    if "reference" not in then and (first := _read(run / MODELS).get("policy.model, its weights")):
        then.setdefault(FIRST_REFERENCE, first)  # it is there if the run began with a warm start
    # Where the checkpoint holds the reference, its name counts; where a folder does, which may have moved, its weights.
    then.pop("reference" if (folder / "reference").is_dir() else "reference_model", None)
    for fact, difference in _DIFFERENCES.items():
        if fact in then and fact in now and then[fact] != now[fact]:
            text = difference.format(now=now[fact] or "empty", then=then[fact] or "empty")
            return f"{text}, or start a new run with policy.model = {folder.parent / 'model'}."
    return None


def earlier_facts(folder: Path, *, has_reference: bool) -> dict[str, str]:
    """Return the facts in `folder` about the reference, which later checkpoints keep.

    has_reference: the present start has one. Without one its checkpoints hold none, as `LOST` then says.
    """
    then = _read(folder / ORIGIN)
    facts = {fact: value for fact, value in then.items() if fact.startswith("reference")}
    is_lost = (folder / "reference").is_dir() or LOST in then
    return facts if has_reference or not is_lost else facts | {LOST: "true"}


def is_reference_lost(folder: Path) -> bool:
    """Return whether a start without a KL did not save the reference that the run's checkpoints had held."""
    return LOST in _read(folder / ORIGIN)


def write_origin(folder: Path, facts: Mapping[str, str]) -> None:
    """Write the facts of a run, if there are any. Raises: OSError."""
    if facts:
        (folder / ORIGIN).write_text(json.dumps(dict(facts), indent=1, sort_keys=True), encoding="utf-8")


def _read(path: Path) -> dict[str, str]:
    """Return the facts in a file; {} without it."""
    if not path.is_file():
        return {}
    facts = json.loads(path.read_bytes())
    if not isinstance(facts, dict):
        raise OperatorError(f"{path} is not a JSON object. Resume from another checkpoint.")
    return {str(name): str(value) for name, value in facts.items()}
