"""TRL's options that change together: GRPO and RLOO, and training on rows."""

import math
import re
from typing import Any

from deploy.migrate import joint
from deploy.migrate.convert import Draft, map_of, texts_of, value_of

_LOSSES = {  # loss_type -> learner.loss, loss.aggregate
    "grpo": ("ppo", "seq_mean_token_mean"),
    "bnpo": ("ppo", "token_mean"),
    "dapo": ("ppo", "token_mean"),
    "dr_grpo": ("ppo", "seq_sum_norm"),
    "cispo": ("cispo", "token_mean"),
    "luspo": ("gspo", "seq_mean_token_sum"),
}
_ADVANTAGES = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
_CORRECTIONS = {"token_truncate": "tis", "token_mask": "icepop"}
_PREFERENCES = ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "simpo", "orpo")


def convert_rl(draft: Draft, *, is_rloo: bool = False, is_asynchronous: bool = False) -> None:
    """Write the settings of GRPO, of RLOO, or of the asynchronous GRPO, whose servers are beside the trainer."""
    size = int(draft.number("num_generations", 2 if is_rloo else 8))
    draft.put("rollout.group_size", size, "num_generations")
    _write_step(draft, size)
    _write_lengths(draft, 2048 if is_asynchronous else 512)
    _write_router_loss(draft)
    if is_rloo:
        draft.put("learner.advantage", "rloo")
        draft.put("learner.loss", "ppo", why="ratios of tokens; there of whole answers, the same in a first update")
        draft.put("loss.aggregate", "seq_mean_token_sum", why="the sum of an answer's logprobs")
    else:
        _write_grpo(draft)
    weight = draft.number("beta", 0.05 if is_rloo else 0.0)
    draft.put("kl.coefficient", weight, "beta")
    draft.put("kl.place", "reward" if is_rloo else "loss", why="as TRL's")
    draft.put("kl.form", "k1" if is_rloo else "k3", why="as TRL's")
    draft.put("learner.dual_clip", None, why="off, as in TRL")
    low = draft.number("epsilon", 0.2)
    high = draft.number("epsilon_high", low)
    is_cap = draft.settings["learner.loss"][0] == "cispo" and "epsilon_high" in draft.asked
    draft.put("learner.clip_low", low, "epsilon")
    draft.put("learner.clip_high", high - 1 if is_cap else high, "epsilon_high", "epsilon")
    if is_asynchronous:
        draft.put("policy.old_logprobs", "behaviour", why="TRL's asynchronous trainer has the server's")
        draft.put("learner.correction", "none", why="the ratio has it")
    else:
        _write_correction(draft)
    if "learner.max_staleness" not in draft.settings:
        draft.put("learner.max_staleness", 0, why="steps wait for their samples")
    _write_servers(draft, "server" if is_asynchronous else draft.text("vllm_mode", "colocate"))
    _write_rewards(draft)
    draft.put("data.label_required", False, why="columns of a row are given to the reward function")
    _write_common(draft)


def convert_rows(draft: Draft, objective: str, lr: float, loss: str = "sigmoid") -> None:
    """Write the settings of a trainer on rows. lr: its default; loss: of preferences."""
    draft.put("objective", objective)
    joint.put_launched_ranks(draft, "num_machines", "num_processes")
    if objective != "reward_model":
        _write_router_loss(draft)
    rows = int(_micro_batches(draft) * draft.number("gradient_accumulation_steps", 1))
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    draft.put("learner.groups_per_step", rows, *names, why=f"{rows} rows")
    if "learner.lr" not in draft.settings:
        draft.put("learner.lr", lr, "learning_rate")
    joint.put_whole_rows(draft, "max_length", 1024)
    _write_length(draft)
    if objective == "sft":
        reason = "Answers alone are trained; there every token of rows with messages"
        joint.put_default_lack(draft, "assistant_only_loss", False, reason)
    kinds = texts_of(draft.text("loss_type", "sigmoid" if loss == "cpo" else loss))
    if loss == "cpo" and kinds != ["simpo"]:
        reason = "CPO compares logprobs without a reference: of its losses there is simpo"
        draft.read.add("loss_type")
        draft.missing[draft.label("loss_type") if "loss_type" in draft.asked else "loss_type sigmoid"] = reason
    elif objective == "dpo" and len(kinds) == 1 and kinds[0] in _PREFERENCES:
        draft.put("preference.loss", kinds[0].removesuffix("_norm"), "loss_type")
        draft.put("preference.average", kinds[0] in ("ipo", "sigmoid_norm"), "loss_type")
    elif kinds not in ([loss], ["nll"], ["kto"]):
        draft.lack("loss_type", "There is no such loss on rows")
    if loss == "cpo":
        draft.put("preference.nll_coefficient", draft.number("cpo_alpha", 1.0), "cpo_alpha")
    _write_common(draft)


def _write_router_loss(draft: Draft) -> None:
    """List the default of the load-balancing loss, which only a mixture of experts has."""
    reason = "Set learner.router_aux_loss for a mixture of experts"
    joint.put_default_lack(draft, "router_aux_loss_coef", 0.001, reason)


def _micro_batches(draft: Draft) -> float:
    """Return the samples that all ranks take at once."""
    micro: float = draft.number("per_device_train_batch_size", 8)
    return micro * int(draft.settings["learner.num_ranks"][0])


def _write_step(draft: Draft, size: int) -> None:
    """Write a step from sizes that count samples: of one rank, of an update, and of a generation."""
    joint.put_launched_ranks(draft, "num_machines", "num_processes")
    parts, micro = draft.number("gradient_accumulation_steps", 1), _micro_batches(draft)
    each = draft.number("steps_per_generation", parts)
    whole = draft.number("generation_batch_size", micro * each) * draft.number("weight_sync_steps", 1)
    epochs = int(draft.number("num_iterations", 1))
    prompts = max(1, round(whole / max(1, size)))
    names = "generation_batch_size" if "generation_batch_size" in draft.asked else "per_device_train_batch_size"
    joint.put_step(draft, prompts, size, micro * parts, names, "gradient_accumulation_steps", epochs)
    if prompts * size != whole:
        draft.put("learner.groups_per_step", prompts, names, why=f"{whole:g} samples there: {prompts} groups of {size}")
    _write_length(draft)


def _put_steps(draft: Draft, setting: str, updates: float, *names: str) -> None:
    """Write a number of steps. updates: TRL counts each update as a step."""
    parts = ("learner.num_mini_batches", "learner.num_epochs")
    of_step = math.prod(draft.settings.get(part, (1, ""))[0] for part in parts)
    draft.put(
        setting, math.ceil(updates / max(1, of_step)), *names, why=f"{of_step} updates a step" if of_step > 1 else ""
    )


def _write_length(draft: Draft) -> None:
    """Write the length of the run."""
    if (steps := draft.number("max_steps", -1)) > 0:
        _put_steps(draft, "run.max_steps", steps, "max_steps")
        if "num_train_epochs" in draft.asked:
            draft.always[draft.label("num_train_epochs")] = "The number of steps decides the length"
    else:
        draft.put("run.max_epochs", draft.number("num_train_epochs", 3), "num_train_epochs")
    draft.read |= {"num_train_epochs", "max_steps"}


def _write_lengths(draft: Draft, longest: int) -> None:
    answer = int(draft.number("max_completion_length", longest))
    draft.put("rollout.max_response_tokens", answer, "max_completion_length", why="of one turn")
    if "max_prompt_length" in draft.asked:
        draft.put("data.max_prompt_tokens", int(draft.number("max_prompt_length")), "max_prompt_length")
    prompt = int(draft.number("max_prompt_length", 1024))
    whole = int(draft.number("vllm_max_model_length", answer + prompt))
    names = ("vllm_max_model_length", "max_completion_length", "max_prompt_length")
    why = "" if {"vllm_max_model_length", "max_prompt_length"} & set(draft.asked) else "1,024 for the prompt"
    draft.put("rollout.max_context_tokens", whole, *names, why=why)
    if "max_tool_calling_iterations" in draft.asked:
        turns = int(draft.number("max_tool_calling_iterations", 4))
        draft.put("rollout.max_turns", turns, "max_tool_calling_iterations")


def _write_grpo(draft: Draft) -> None:
    kind = draft.text("loss_type", "dapo").lower()
    loss, aggregate = _LOSSES.get(kind, ("ppo", "token_mean"))
    if kind not in _LOSSES:
        draft.lack("loss_type", "learner.loss has no such name")
    is_sequence = draft.text("importance_sampling_level", "token") == "sequence"
    draft.put("learner.loss", "gspo" if is_sequence else loss, "importance_sampling_level", "loss_type")
    draft.put("loss.aggregate", aggregate, "loss_type")
    scale = draft.text("scale_rewards", "group").lower()
    if scale in _ADVANTAGES:
        draft.put("learner.advantage", _ADVANTAGES[scale], "scale_rewards")
    else:
        draft.lack("scale_rewards", "The deviation is the group's, or none (dr_grpo)")


def _write_correction(draft: Draft) -> None:
    prefix = "vllm_importance_sampling_"
    mode = draft.text(f"{prefix}mode", "sequence_mask")
    names = [f"{prefix}{name}" for name in ("correction", "mode", "clip_min", "clip_max")]
    draft.put("policy.old_logprobs", "recompute", why="TRL's old logprobs are the trainer's")
    if draft.is_on("use_vllm") and draft.is_on(names[0], True):
        kind = _CORRECTIONS.get(mode, "icepop")
        why = "" if mode in _CORRECTIONS else "of tokens; TRL masks whole answers by the product of their ratios"
        draft.put("learner.correction", kind, names[1], why=why)
        draft.put("learner.correction_high", draft.number(names[3], 3.0), names[3])
        if names[2] in draft.asked:
            draft.put("learner.correction_low", draft.number(names[2]), names[2])
    elif draft.settings["learner.loss"][0] == "cispo":
        draft.put("policy.old_logprobs", "behaviour", why="cispo's weight then has the engine's difference too")
        draft.put("learner.correction", "none", names[0])
    else:
        draft.put("learner.correction", "none", "use_vllm")
    draft.read |= {*names, "use_vllm"}


def _write_servers(draft: Draft, mode: str) -> None:
    ranks = draft.settings["learner.num_ranks"][0]
    size = draft.settings.get("rollout.tensor_parallel_size", (1, ""))[0]
    draft.put("placement.devices", "split" if mode == "server" else "shared", "vllm_mode")
    servers = 1 if mode == "server" else max(1, ranks // size)
    draft.put("rollout.num_servers", servers, "vllm_mode", "num_processes")


def _write_rewards(draft: Draft) -> None:
    sources = [f"{joint.MODEL}{name}" for name in texts_of(draft.text("reward_model_name_or_path"))]
    weights = [
        float(each) for each in texts_of(draft.text("reward_weights")) if isinstance(value_of(each), int | float)
    ]
    for name in texts_of(draft.text("reward_funcs")):
        maker, is_made, _ = name.partition("(")
        if maker.endswith("get_soft_overlong_punishment"):
            reason = "A service gets no tokens: set rewards.overlong_buffer_tokens and rewards.overlong_penalty"
            draft.missing[f"reward_funcs {maker}"] = reason
            weights[len(sources) :] = weights[len(sources) + 1 :]
            continue
        if is_made or maker == "lambda":
            draft.missing[f"reward_funcs {maker}"] = "Give its result a name in a file, and serve FILE.py:NAME"
            name = "FILE.py:NAME"
        module, _, function = name.rpartition(".")
        if ".py:" in name:
            sources.append(name)
        else:
            sources.append(f"{joint.MODEL}{name}" if "/" in name else f"{module or 'trl.rewards'}:{function}")
    if any(".py:" in source for source in sources):
        draft.steps.append("a service runs the whole file of its function: move functions out of a file that trains")
    names = [name for name in ("reward_model_name_or_path", "reward_funcs") if name in draft.asked]
    if len(sources) == 1 and sources[0].startswith(joint.MODEL):
        joint.put_reward_model(draft, sources[0].removeprefix(joint.MODEL), names[0])
    else:
        joint.put_rewards(draft, sources, weights, *names, "reward_weights")
    joint.put_no_reward(draft)
    if "missing_eos_penalty" in draft.asked:
        draft.put("rewards.truncated", "penalise", "missing_eos_penalty")
        draft.put("rewards.truncated_penalty", draft.number("missing_eos_penalty"), "missing_eos_penalty")


def _write_common(draft: Draft) -> None:
    """Write what all trainers of TRL have."""
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    draft.put("learner.betas", betas, "adam_beta1", "adam_beta2")
    options = _map_of(draft, "lr_scheduler_kwargs")
    share = float(options.get("min_lr") or 0) / (float(draft.settings["learner.lr"][0]) or 1)
    draft.put("learner.min_lr_ratio", float(options.get("min_lr_rate") or share), "lr_scheduler_kwargs")
    warm_up = draft.number("warmup_steps", 0)
    if warm_up >= 1:
        _put_steps(draft, "learner.lr_warmup_steps", warm_up, "warmup_steps")
        if draft.settings.pop("learner.lr_warmup_ratio", None):
            draft.always[draft.label("warmup_ratio")] = "The number of steps decides the warm-up"
    elif warm_up:
        draft.put("learner.lr_warmup_ratio", warm_up, "warmup_steps")
    if draft.settings["learner.lr_schedule"][0] == "constant" and "with" not in draft.text("lr_scheduler_type"):
        joint.put_no_warm_up(draft, "warmup_steps", "warmup_ratio")
    _write_model(draft)
    _write_data(draft)
    strategy, every = draft.text("save_strategy", "steps"), draft.number("save_steps", 500)
    if strategy in ("epoch", "best"):
        draft.lack("save_strategy", "Set learner.checkpoint_every_steps")
    _put_steps(
        draft, "learner.checkpoint_every_steps", every if strategy == "steps" else 0, "save_strategy", "save_steps"
    )
    joint.put_kept_checkpoints(draft, "save_total_limit")
    for report in texts_of(draft.text("report_to", "none")):
        if report == "wandb":
            draft.put("report.wandb_project", "huggingface", "report_to", why="WANDB_PROJECT's default there")
        elif report == "tensorboard":
            draft.put("report.tensorboard", True, "report_to")
        elif report not in ("none", "all"):
            draft.missing[f"report_to {report}"] = "Metrics go to metrics.jsonl, W&B, TensorBoard and Prometheus"


def _write_model(draft: Draft) -> None:
    given = str(_map_of(draft, "model_init_kwargs").get("dtype", ""))
    dtype = draft.text("dtype", given or "float32").removeprefix("torch.")
    is_mixed = draft.is_on("bf16", not draft.is_on("fp16")) or draft.is_on("fp16")
    kept = dtype == "float32" and not is_mixed
    why = "mixed precision" if dtype == "float32" and is_mixed else ""
    draft.put("policy.dtype", "float32" if kept else "bfloat16", "dtype", "bf16", why=why)
    adapters = ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
    if draft.is_on("use_peft"):
        why = "" if "lora_r" in draft.asked else "TRL's default of lora_r"
        draft.put("policy.lora.rank", int(draft.number("lora_r", 16)), "use_peft", "lora_r", why=why)
        draft.put("policy.lora.alpha", draft.number("lora_alpha", 32), "lora_alpha")
        targets = texts_of(draft.text("lora_target_modules", "q_proj,v_proj"))
        why = "" if "lora_target_modules" in draft.asked else "PEFT's for Llama, Mistral, Qwen and Gemma"
        draft.put("policy.lora.targets", [] if targets == ["all-linear"] else targets, "lora_target_modules", why=why)
        joint.put_default_lack(draft, "lora_dropout", 0.05, "Adapters have no dropout")
    for name in adapters:
        draft.read.add(name)
        if name in draft.asked and not draft.is_on("use_peft"):
            draft.missing.pop(draft.label(name), None)
            draft.always[draft.label(name)] = "There is no adapter"
    stage = re.search(r"^(\d)$|zero_?(?:stage)?_?(\d)", draft.text("config_file"))
    if stage:
        draft.put("learner.zero_stage", int(stage[1] or stage[2]), "config_file")
    elif "config_file" in draft.asked:
        draft.always[draft.label("config_file")] = "Set learner.zero_stage and learner.num_ranks to those of this file"


def _write_data(draft: Draft) -> None:
    names, config = texts_of(draft.text("dataset_name")), draft.text("dataset_config")
    train, held_out = draft.text("dataset_train_split", "train"), draft.text("dataset_test_split", "test")
    paths = [joint.data_path(f"{name}/{config}" if config else name, train.partition("[")[0]) for name in names]
    if "[" in train:
        draft.lack("dataset_train_split", "The whole split is taken: data.max_prompts takes its first rows")
    joint.put_data(draft, "data.train", paths, "dataset_name", "dataset_config", "dataset_train_split")
    every = draft.number("eval_steps", 0)
    if draft.text("eval_strategy", "no") == "steps" and names:
        draft.put("data.eval", joint.data_path(names[0], held_out.partition("[")[0]), "dataset_test_split")
        _put_steps(draft, "eval.every_steps", every or draft.number("logging_steps", 10), "eval_steps")
        if "objective" not in draft.settings:
            size = draft.number("num_generations_eval", draft.settings["rollout.group_size"][0])
            draft.put("eval.samples", int(size), "num_generations_eval")
        draft.put("eval.before", draft.is_on("eval_on_start"), "eval_on_start")
        joint.put_evaluated_rows(draft)
    else:
        joint.put_no_evaluation(draft, "eval_steps", "eval_on_start", "num_generations_eval", "dataset_test_split")
        if draft.text("eval_strategy", "no") == "epoch":
            draft.lack("eval_strategy", "Set data.eval and eval.every_steps")


def _map_of(draft: Draft, name: str) -> dict[str, Any]:
    found = map_of(draft.text(name))
    if found is None:
        draft.lack(name, "It is not a map")
    return found or {}
