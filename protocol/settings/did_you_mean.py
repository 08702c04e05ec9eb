"""The most likely setting for a name that does not exist."""

import difflib
import re
from collections.abc import Sequence

# Setting -> its names in other trainers.
_ELSEWHERE = {
    "learner.lr": "learning_rate",
    "learner.lr_warmup_steps": "warmup_steps",
    "learner.lr_schedule": "lr_scheduler_type",
    "learner.max_grad_norm": "grad_clip",
    "learner.recipe": "algorithm algo",
    "learner.advantage": "adv_estimator advantage_estimator",
    "learner.loss": "loss_type loss_mode",
    "loss.aggregate": "loss_agg_mode",
    "learner.clip_low": "clip_ratio_low eps_clip clip_ratio",
    "learner.clip_high": "clip_ratio_high epsilon_high",
    "learner.dual_clip": "clip_ratio_c",
    "learner.gae_lambda": "lam lambd",
    "kl.coefficient": "kl_loss_coef beta init_kl_coef kl_coef",
    "kl.target": "kl_target target_kl",
    "kl.form": "kl_estimator kl_penalty",
    "rewards.normalize": "normalize_reward",
    "rewards.clip": "reward_clip_range",
    "rewards.overlong_buffer_tokens": "overlong_buffer_len",
    "rewards.overlong_penalty": "overlong_penalty_factor",
    "rewards.truncated": "mask_truncated_completions",
    "learner.lr_warmup_ratio": "lr_warmup_steps_ratio warmup_ratio",
    "learner.groups_per_step": "batch_size train_batch_size rollout_batch_size",
    "learner.micro_batch_tokens": "micro_batch_size",
    "learner.checkpoint_every_steps": "save_steps save_freq save_interval",
    "learner.num_ranks": "num_gpus world_size",
    "rollout.group_size": "num_generations n_samples_per_prompt num_samples n",
    "rollout.max_response_tokens": "max_tokens max_new_tokens generate_max_len max_completion_length",
    "rollout.max_context_tokens": "max_model_len max_length",
    "rollout.tensor_parallel_size": "tp",
    "rollout.num_servers": "num_engines vllm_num_engines",
    "rollout.engine_args": "vllm_args",
    "rollout.environment": "env",
    "policy.model": "model model_name_or_path model_path pretrain",
    "critic.model": "critic_pretrain",
    "critic.lr": "critic_learning_rate",
    "critic.warmup_steps": "critic_warmup",
    "learner.num_mini_batches": "ppo_mini_batch_size",
    "learner.num_epochs": "ppo_epochs",
    "policy.dtype": "torch_dtype precision",
    "data.train": "train_files prompt_data train_file dataset prompt_data_probs prompts",
    "data.eval": "val_files eval_dataset",
    "data.prompt_key": "input_key",
    "data.template": "input_template prompt_template",
    "data.max_prompts": "max_samples train_max_samples",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "data.overlong": "filter_overlong_prompts",
    "rollout.truncate_left": "truncation",
    "rewards.endpoints": "reward_url remote_rm_url",
    "run.dir": "output_dir save_path",
    "run.name": "run_name experiment_name",
    "run.max_steps": "total_training_steps num_steps steps",
    "run.resume": "resume_from_checkpoint",
    "eval.every_steps": "eval_steps test_freq",
    "report.wandb_project": "wandb use_wandb project project_name",
}
_BY_OTHER_NAME = {name: setting for setting, names in _ELSEWHERE.items() for name in names.split()}

# Settings of version 0.1 that this version does not have.
_REMOVED = {
    "learner.float32_head",
    "learner.proof_timeout_s",
    "learner.prove_checkpoints",
    "learner.sequence_parallel",
    "policy.lora.push",
    "policy.lora.quantize",
    "rewards.shadow_wait_s",
}


def is_removed(name: str) -> bool:
    """Return whether a dotted name is a setting of version 0.1 that this version does not have."""
    return name in _REMOVED or re.fullmatch(r"rewards\.endpoints\.\d+\.shadow", name) is not None


def removed_settings(names: Sequence[str]) -> str:
    """Return the sentence about settings that this version does not have any more."""
    which, them = ("does", "it") if len(names) == 1 else ("do", "them")
    shadow = " A shadow endpoint is now one with weight 0." if any(name.endswith(".shadow") for name in names) else ""
    text = f"settings: {', '.join(names)} {which} not exist any more; Sluice 0.1.0 reads {them}. Remove {them}."
    return text + shadow


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """Return the sentence about a name that is not among the `known` dotted names, with the likeliest one."""
    if "." in name and name in known:
        section, key = name.split(".", 1)
        below = f"{section}: {{{key}: ..}}"
        return f"settings: {name} is written as one key. In a YAML file it goes below its section: {below}."
    sections = {setting.partition(".")[0] for setting in known}
    if "." not in name and (near := difflib.get_close_matches(name, sections, n=1, cutoff=0.8)):
        return f"settings: {name} does not exist. Did you mean the section {near[0]}?"
    likeliest = _likeliest(name, known)
    hint = f"Did you mean {likeliest}?" if likeliest else "--help lists every setting."
    return f"settings: {name} does not exist. {hint}"


def written_as_option(text: str, known: Sequence[str]) -> str | None:
    """Return the sentence about an option written as `learner.lr=1e-6`; None for other texts."""
    name, equals, value = text.lstrip("+").partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        return None
    if name in known:
        return f"settings: {text} is not an option. Write --{name} {value}."
    likeliest = _likeliest(name, known)
    hint = f"Write --{likeliest} {value}, if it is the same setting." if likeliest else "--help lists every setting."
    return f"settings: {text} is not an option. {hint}"


def likeliest_value(given: object, expected: str) -> str:
    """Return " Did you mean VALUE?" for one of the quoted values in `expected`; "" when none is close."""
    close = difflib.get_close_matches(str(given), re.findall(r"'([^']+)'", expected), n=1)
    return f". Did you mean {close[0]}?" if close else ""


def _likeliest(name: str, known: Sequence[str]) -> str | None:
    """Return the first of: a map with a key appended, a misspelt section, another trainer's name, another section, a
    misspelling."""
    for setting in known:
        if "." in setting and name.startswith(f"{setting}."):
            return setting
    section, _, key = name.partition(".")
    for near in difflib.get_close_matches(section, {setting.partition(".")[0] for setting in known}, n=1, cutoff=0.8):
        if f"{near}.{key}" in known:
            return f"{near}.{key}"
    last = name.rpartition(".")[2].replace("-", "_")
    if _BY_OTHER_NAME.get(last) in known:
        return _BY_OTHER_NAME[last]
    same = [setting for setting in known if setting.rpartition(".")[2] == last]
    if same:
        return min(same, key=len)
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None
