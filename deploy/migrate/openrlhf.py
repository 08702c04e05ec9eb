"""OpenRLHF's options that change together: PPO and its kin, and training on rows."""

from deploy.migrate import joint
from deploy.migrate.convert import Draft, texts_of

_ADVANTAGES = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
_PROJECTS = {"reward_model": "rm", "distill": "sft"}  # objective -> last part of the default W&B project
_DIFFERENCE = "clips rewards; there their distances from the group's mean"
_OF_GROUPS = dict.fromkeys(("reinforce_baseline", "rloo", "dr_grpo"), _DIFFERENCE)
_OF_GROUPS["group_norm"] = f"{_DIFFERENCE}, in deviations"
_CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "geo_mask"}


def convert_rl(draft: Draft) -> None:
    """Write the settings of an RL command."""
    _write_batches(draft)
    _write_lengths(draft)
    _write_algorithm(draft)
    _write_schedule(draft)
    _write_placement(draft)
    _write_rewards(draft)
    _write_critic(draft)
    _write_template(draft)
    _write_data(draft, "data.prompt_dataset", "data.prompt_probs", "data.prompt_split")
    every = draft.number("eval.steps", -1)
    if "data.eval" in draft.settings and every > 0:
        draft.put("eval.samples", int(draft.number("eval.n_samples_per_prompt", 4)), "eval.n_samples_per_prompt")
        reason = "Samples have rollout.temperature; eval.sets takes a temperature of its own"
        draft.lack("eval.temperature", reason)
        joint.put_default_lack(draft, "eval.temperature", 0.6, reason)
        joint.put_evaluated_rows(draft)
    _write_reports(draft, "ppo")
    draft.put("data.label_required", bool(draft.asked.get("data.label_key")), "data.label_key")


def convert_rows(draft: Draft, objective: str, lr: float, epochs: int, length: int) -> None:
    """Write the settings of a command that trains on rows; lr, epochs and length are the command's defaults."""
    is_dpo = objective == "dpo"
    draft.put("objective", objective)
    joint.put_launched_ranks(draft, "num_machines", "num_processes")
    defaults = {"learner.lr": ("actor.adam.lr", lr), "run.max_epochs": ("train.max_epochs", epochs)}
    if objective == "kto":
        defaults["preference.beta"] = ("model.beta", 0.01)
    if objective == "distill":
        _write_distillation(draft)
    for setting, (name, value) in defaults.items():
        if setting not in draft.settings:
            draft.put(setting, value, name)
    _write_schedule(draft)
    _write_template(draft, "User: {}\\nAssistant: " if objective in ("sft", "kto", "distill") else "")
    joint.put_whole_rows(draft, "data.max_len", length)
    _write_data(draft, "data.dataset", "data.dataset_probs", "data.dataset_split", "test" if is_dpo else "train")
    _write_reports(draft, _PROJECTS.get(objective, objective))


def _write_schedule(draft: Draft) -> None:
    """Write what transformers' schedules make of a warm-up and of the last learning rate."""
    name, last = draft.text("actor.lr_scheduler", "cosine_with_min_lr"), "actor.min_lr_ratio"
    if name == "constant":
        joint.put_no_warm_up(draft, "actor.lr_warmup_ratio")
    elif name in ("linear", "cosine"):
        if last in draft.asked:
            draft.always[draft.label(last)] = "cosine_with_min_lr alone reads it there"
        draft.put("learner.min_lr_ratio", 0, "actor.lr_scheduler", why="it ends at 0 there")


def _write_template(draft: Draft, default: str = "") -> None:
    """Write the template of prompts, which a chat template replaces there. default: the command's own."""
    name = "data.input_template"
    if not draft.is_on("data.apply_chat_template"):
        if default:
            joint.put_default_lack(draft, name, f"'{default}'", "Write it into the rows' prompts")
    elif name in draft.asked:
        draft.settings.pop("data.template", None)
        draft.missing.pop(draft.label(name), None)
        draft.always[draft.label(name)] = "The chat template comes in its place there"


def _write_critic(draft: Draft) -> None:
    """Write the model that a critic begins with, and list its warm-up."""
    warm_up, model = "critic.lr_warmup_ratio", draft.text("reward.model_name_or_path").partition(",")[0]
    if draft.settings.get("learner.advantage", ("", ""))[0] != "gae":
        draft.read.add(warm_up)
        if warm_up in draft.asked:
            draft.always[draft.label(warm_up)] = "There is no critic"
        return
    is_scored_by_it = not (draft.text("reward.remote_url") or draft.text("train.agent_func_path"))
    if model and is_scored_by_it and "critic.model" not in draft.settings:
        draft.put("critic.model", model, "reward.model_name_or_path", why="the critic begins as it there")
    reason = "Set critic.lr_warmup_steps to this share of the run's steps"
    if draft.number(warm_up, 0.03):
        draft.lack(warm_up, reason)
    joint.put_default_lack(draft, warm_up, 0.03, reason)


def _write_distillation(draft: Draft) -> None:
    """Write the divergence from the teacher, and the weight of the rows' own loss beside it."""
    draft.put("distill.beta", 0, why="KL(teacher, student), as OpenRLHF's")
    share = draft.number("kd_coef", 0.4)
    if 0 < share <= 1:
        why = "over the divergence's weight, which is 1; there both weights add up to 1"
        draft.put("distill.nll_coefficient", float(f"{(1 - share) / share:.6g}"), "kd_coef", why=why)
    else:
        draft.lack("kd_coef", "distill.nll_coefficient is beside the divergence: its share is above 0 and at most 1")


def _write_batches(draft: Draft) -> None:
    prompts, samples = int(draft.number("rollout.batch_size", 1024)), int(draft.number("train.batch_size", 128))
    size, epochs = int(draft.number("rollout.n_samples_per_prompt", 1)), int(draft.number("train.max_epochs", 1))
    joint.put_step(draft, prompts, size, samples, "rollout.batch_size", "train.batch_size", epochs)
    if draft.is_on("train.async_enable"):
        queue = int(draft.number("train.async_queue_size", 1))
        names = ("train.async_enable", "train.async_queue_size")
        draft.put("learner.max_staleness", queue, *names, why="a step has a batch of rollouts")
    else:
        draft.put("learner.max_staleness", 0, why="no train.async_enable: steps wait for their samples")


def _write_lengths(draft: Draft) -> None:
    prompt, answer = draft.number("prompt_max_len", 1024), draft.number("rollout.max_new_tokens", 1024)
    whole = int(draft.number("data.max_len", prompt + answer))
    draft.put("rollout.max_context_tokens", whole, "data.max_len", "prompt_max_len", "rollout.max_new_tokens")
    if "rollout.max_new_tokens" in draft.asked or "data.max_len" not in draft.asked:
        draft.put("rollout.max_response_tokens", int(answer), "rollout.max_new_tokens", why="of one turn")
    else:
        why = "there an answer has what its prompt leaves; half of data.max_len is kept for it"
        draft.put("rollout.max_response_tokens", whole // 2, "data.max_len", why=why)
    if "prompt_max_len" in draft.asked:
        draft.put("data.max_prompt_tokens", int(prompt), "prompt_max_len")
    elif "rollout.max_new_tokens" in draft.asked:
        draft.put("rollout.truncate_left", True, why="longer prompts lose their beginning there")
    else:
        draft.put("data.overlong", "skip", why="longer prompts are skipped; there they leave less for the answer")


def _write_algorithm(draft: Draft) -> None:
    name = draft.text("algo.advantage.estimator", "gae")
    if name in _OF_GROUPS and "rewards.clip" in draft.settings:  # the baseline comes first there
        draft.put("rewards.clip", draft.settings["rewards.clip"][0], "reward.clip_range", why=_OF_GROUPS[name])
    if name in _ADVANTAGES:
        draft.put("learner.advantage", _ADVANTAGES[name], "algo.advantage.estimator")
    else:
        draft.lack("algo.advantage.estimator", "learner.advantage has no such name")
    bounds = texts_of(draft.text("actor.eps_clip_low_high"))
    names = ("actor.eps_clip_low_high",) if len(bounds) == 2 else ("actor.eps_clip",)
    low, high = map(float, bounds) if len(bounds) == 2 else [draft.number("actor.eps_clip", 0.2)] * 2
    draft.put("learner.clip_low", low, *names)
    draft.put("learner.clip_high", high, *names)
    place = "loss" if draft.is_on("algo.kl.use_loss") else "reward"
    draft.put("kl.place", place, "algo.kl.use_loss")
    if place == "loss" and draft.settings["kl.form"][0] == "k1":
        draft.put("kl.form", "k2", "algo.kl.estimator", why="k1 has no gradient in the loss; k2's is that of its mean")
    _write_correction(draft)
    bounds = texts_of(draft.text("algo.dynamic_filtering_range", "0 1"))
    if draft.is_on("algo.dynamic_filtering_enable") and len(bounds) == 2:
        draft.put("filter.max_replaced", 0, "algo.dynamic_filtering_enable", why="no limit there")
        draft.put("filter.low", float(bounds[0]), "algo.dynamic_filtering_range")
        draft.put("filter.high", float(bounds[1]), "algo.dynamic_filtering_range")
    elif "algo.dynamic_filtering_range" in draft.asked:
        draft.always[draft.label("algo.dynamic_filtering_range")] = "No filter is on"


def _write_correction(draft: Draft) -> None:
    prefix = "algo.advantage.is_correction_"
    kind, bounds = draft.text(f"{prefix}type", "tis"), texts_of(draft.text(f"{prefix}threshold", "0.5 5.0"))
    draft.put("policy.old_logprobs", "recompute", why="OpenRLHF recomputes old logprobs")
    is_gspo = draft.settings["learner.loss"][0] == "gspo"
    if is_gspo:
        draft.put("loss.aggregate", "seq_mean_token_mean", why="OpenRLHF's gspo has no other")
    if not draft.is_on(f"{prefix}enable"):
        draft.put("learner.correction", "none", f"{prefix}enable")
    elif is_gspo:
        draft.put("policy.old_logprobs", "behaviour", f"{prefix}enable", why="gspo's ratio is to the engine's then")
        draft.put("learner.correction", "none", f"{prefix}enable", why="the ratio has it")
    elif kind not in _CORRECTIONS:
        draft.lack(f"{prefix}type", "learner.correction has no such name")
    else:
        differs = {"seq-mask-tis": "the kept tokens are weighed there, too"}
        if len(bounds) > 1:
            differs["tis"] = f"smaller weights than {bounds[0]} are raised to it there"
        names = (f"{prefix}enable", f"{prefix}type")
        draft.put("learner.correction", _CORRECTIONS[kind], *names, why=differs.get(kind, ""))
        draft.put("learner.correction_low", float(bounds[0]) if len(bounds) > 1 else None, f"{prefix}threshold")
        draft.put("learner.correction_high", float(bounds[-1]), f"{prefix}threshold")


def _write_placement(draft: Draft) -> None:
    nodes, gpus = int(draft.number("actor.num_nodes", 1)), int(draft.number("actor.num_gpus_per_node", 8))
    engines, size = int(draft.number("vllm.num_engines", 1)), int(draft.number("vllm.tensor_parallel_size", 1))
    names = ("actor.num_nodes", "actor.num_gpus_per_node")
    joint.put_ranks(draft, nodes, gpus, *names)
    draft.put("rollout.num_servers", engines, "vllm.num_engines")
    is_shared = draft.is_on("train.colocate_all") and not draft.is_on("train.async_enable")
    if is_shared and engines * size == nodes * gpus:
        draft.put("placement.devices", "shared", "train.colocate_all")
    elif is_shared:
        why = f"{engines} engines of {size} GPUs do not fill the {nodes * gpus} ranks' GPUs: they get GPUs of their own"
        draft.put("placement.devices", "split", "train.colocate_all", why=why)
    else:
        why = "engines have GPUs of their own in asynchronous training" if draft.is_on("train.colocate_all") else ""
        draft.put("placement.devices", "split", "train.colocate_all", why=why)


def _write_rewards(draft: Draft) -> None:
    sources = texts_of(draft.text("reward.remote_url"))
    if agent := draft.text("train.agent_func_path"):
        draft.put("rollout.environment", f"openrlhf_agent:{agent}", "train.agent_func_path")
        if sources:
            draft.always[draft.label("reward.remote_url")] = "The agent's reward alone counts there"
    else:
        joint.put_rewards(draft, sources, (), "reward.remote_url")
        if len(sources) > 1:
            why = "one of them scores a sample; releases before 0.7 added them up"
            draft.put("rewards.combine", "shard", "reward.remote_url", why=why)
    if model := draft.text("reward.model_name_or_path"):
        if {"rewards.endpoints", "rollout.environment"} & set(draft.settings):
            draft.always[draft.label("reward.model_name_or_path")] = "Another source of rewards counts there"
        else:
            joint.put_reward_model(draft, model, "reward.model_name_or_path")
    joint.put_no_reward(draft)


def _write_data(draft: Draft, names: str, probs: str, split: str, held_out_split: str = "train") -> None:
    """Write data.train, data.eval and the cadence of evaluations. held_out_split: the default of eval.split."""
    paths, shares = texts_of(draft.text(names)), texts_of(draft.text(probs))
    rows = [joint.data_path(path, draft.text(split, "train")) for path in paths]
    if len(shares) == len(rows) > 1:
        mixed = [{"path": path, "weight": float(share)} for path, share in zip(rows, shares, strict=True)]
        draft.put("data.train", mixed, names, probs)
    else:
        joint.put_data(draft, "data.train", rows, names, split)
    held_out = [
        joint.data_path(path, draft.text("eval.split", held_out_split)) for path in texts_of(draft.text("eval.dataset"))
    ]
    joint.put_data(draft, "data.eval", held_out, "eval.dataset")
    every = draft.number("eval.steps", -1)
    if held_out and every > 0:
        draft.put("eval.every_steps", int(every), "eval.steps")
    else:
        joint.put_no_evaluation(draft, "eval.steps", "eval.n_samples_per_prompt", "eval.temperature", "eval.split")


def _write_reports(draft: Draft, program: str) -> None:
    """Write Weights & Biases. program: the last part of the default project."""
    project = draft.text("logger.wandb.project", f"openrlhf_train_{program}")
    if draft.text("logger.wandb.key"):
        draft.put("report.wandb_project", project, "logger.wandb.project")
        draft.always["logger.wandb.key ***"] = "Export WANDB_API_KEY, or run wandb login"
