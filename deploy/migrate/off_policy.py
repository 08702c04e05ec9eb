"""verl's options about the age of samples: what one push of weights has, staleness, old logprobs and corrections."""

import math

from deploy.migrate import joint
from deploy.migrate.convert import Draft

_MASKS = {"token_k1": "icepop", "seq_mean_k1": "geo_mask", "geometric": "geo_mask", "token": "icepop"}
_CORRECTION = "algorithm.rollout_correction."
_PUSHES = "async_training.trigger_parameter_sync_step"


def write_step(draft: Draft, size: int) -> None:
    """Write the prompts of a step, which one push of weights ends."""
    part, epochs = draft.number("actor.ppo_mini_batch_size", 256), int(draft.number("actor.ppo_epochs", 1))
    step, update = "data.train_batch_size", "actor.ppo_mini_batch_size"
    prompts = int(draft.number(step, 1024)) or int(part)
    if not is_fully_async(draft):
        joint.put_step(draft, prompts, size, part * size, step, update, epochs)
        return
    batches = "async_training.require_batches"
    prompts = int(part * draft.number(batches, 1) * batches_per_push(draft))
    joint.put_step(draft, prompts, size, part * size, batches, update, epochs)
    why = f"what one push of weights has: {prompts} prompts, {prompts * size} samples"
    draft.put("learner.groups_per_step", prompts, update, batches, _PUSHES, why=why)
    if epochs > 1:
        draft.put("learner.num_epochs", epochs, "actor.ppo_epochs", why="over a step; there over require_batches")


def is_fully_async(draft: Draft) -> bool:
    return any(name.startswith("async_training.") for name in draft.asked)


def batches_per_push(draft: Draft) -> float:
    """Return the batches that the trainer takes between two pushes of weights; its schedules count them."""
    batches: float = draft.number(_PUSHES, 4)
    return max(1, batches) if is_fully_async(draft) else 1


def write_correction(draft: Draft) -> None:
    """Write the old logprobs, and the correction of how they differ from the servers'."""
    given = {part: draft.text(f"{_CORRECTION}rollout_{part}") for part in ("is", "rs")}
    reason = _write_old_logprobs(draft)
    is_in_loss = bool(reason) and draft.is_on(f"{_CORRECTION}bypass_mode")
    for part in ("is", "rs") if reason and not is_in_loss else ("is",) if reason else ():
        if given[part]:
            draft.always[draft.label(f"{_CORRECTION}rollout_{part}")] = reason
            given[part] = ""
    kind, why, part = "none", "", "rs" if given["rs"] in _MASKS else "is"
    low, high = _bounds(draft, f"{_CORRECTION}rollout_{part}_threshold", part)
    if part == "rs":
        kind = _MASKS[given["rs"]]
        if given["rs"].endswith("_k1") and low and high:
            low, high, why = 1 / high, 1 / low, "there of the inverse weight"
    elif given["is"] == "token":
        kind, high = "icepop" if low else "tis", high or 2.0
    draft.put("learner.correction", kind, f"{_CORRECTION}rollout_{part}")
    for side, bound in (("low", low), ("high", high)):
        if kind != "none" and (bound or kind != "tis"):
            value = float(f"{bound:.6g}") if bound else None
            draft.put(f"learner.correction_{side}", value, f"{_CORRECTION}rollout_{part}_threshold", why=why)
    if kind == "icepop" and part == "rs" and not given["is"] and not is_in_loss:
        draft.put("learner.correction", kind, f"{_CORRECTION}rollout_rs", why="it also weighs the tokens that it keeps")
    if given["rs"] and part == "is":
        draft.lack(f"{_CORRECTION}rollout_rs", "learner.correction has one form: tis, icepop or geo_mask")
    if given["is"] and (given["is"] != "token" or kind == "geo_mask"):
        draft.lack(f"{_CORRECTION}rollout_is", "learner.correction has one form: tis, icepop or geo_mask")
    draft.read |= {f"{_CORRECTION}rollout_{name}" for name in ("is", "rs", "is_threshold", "rs_threshold")}


def _write_old_logprobs(draft: Draft) -> str:
    """Write where old logprobs come from; return why weights of a correction are without effect, if they are."""
    bypass, kind = f"{_CORRECTION}bypass_mode", draft.text(f"{_CORRECTION}loss_type", "ppo_clip")
    recorded = [f"async_training.{name}" for name in ("use_rollout_log_probs", "compute_prox_log_prob")]
    # The asynchronous trainer's default: the rollout's logprobs stand for the old ones.
    may_be_recorded = is_fully_async(draft) and (bypass not in draft.asked or recorded[0] in draft.asked)
    is_recorded = may_be_recorded and draft.is_on(recorded[0], True) and not draft.is_on(recorded[1])
    draft.read |= {*recorded, "actor.policy_loss.loss_mode"}
    if draft.is_on(bypass):
        mode = draft.text("actor.policy_loss.loss_mode", "vanilla")
        label = draft.label("actor.policy_loss.loss_mode")
        if mode != "vanilla":
            draft.missing.pop(label, None)
            draft.always[label] = "bypass_mode has a loss of its own"
        names = (f"{_CORRECTION}loss_type",) if kind == "reinforce" else (bypass,)
        draft.put("learner.loss", "reinforce" if kind == "reinforce" else "ppo", *names)
        draft.put("policy.old_logprobs", "behaviour", bypass)
        return "" if kind == "reinforce" else "The ratio of bypass_mode's loss has it already"
    if is_recorded:
        draft.put("policy.old_logprobs", "behaviour", *recorded)
        return "Old logprobs are the rollout's, so that each weight is 1"
    if draft.settings.get("learner.loss", ("", ""))[0] == "cispo" and not draft.text(f"{_CORRECTION}rollout_is"):
        draft.put("policy.old_logprobs", "behaviour", why="cispo's weight then has the engine's difference too")
    else:
        draft.put("policy.old_logprobs", "recompute", why="verl recomputes old logprobs")
    return ""


def _bounds(draft: Draft, name: str, part: str) -> tuple[float | None, float | None]:
    """Return the bounds of a threshold: LOW_HIGH, or HIGH alone, whose inverse is the lower bound of a mask."""
    text = draft.text(name).strip("'\" ")
    try:
        *low, high = map(float, text.split("_"))
    except ValueError:
        if text:
            draft.missing[draft.label(name)] = "It is not a number, or two with _ between them"
        return None, None
    return (low[0] if low else 1 / high if part == "rs" and high else None), high


def write_staleness(draft: Draft) -> None:
    mode, share = draft.text("trainer.v1.trainer_mode", "sync"), "async_training.staleness_threshold"
    if is_fully_async(draft):
        why = "in pushes; there a share of the prompts between two"
        draft.put("learner.max_staleness", math.ceil(draft.number(share, 0.1)), share, why=why)
    elif mode != "sync":
        ahead, most = f"trainer.v1.{mode}.num_warmup_batches", "trainer.v1.sampler.max_off_policy_threshold"
        bound = min(math.ceil(draft.number(ahead, 1)), max(0, int(draft.number(most, 8)) - 1))
        draft.put("learner.max_staleness", bound, ahead, most, why="batches that are generated ahead")
    elif not draft.is_on("hybrid_engine", True):
        draft.put("learner.max_staleness", 1, "hybrid_engine", why="a batch is generated while another one trains")
    else:
        draft.put("learner.max_staleness", 0, why="steps wait for their samples")
