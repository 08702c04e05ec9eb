"""The most likely setting for a name that does not exist."""

import difflib
from collections.abc import Sequence

# Name in other trainers -> name here.
_ELSEWHERE = {
    "learning_rate": "learner.lr",
    "warmup_steps": "learner.lr_warmup_steps",
    "lr_scheduler_type": "learner.lr_schedule",
    "grad_clip": "learner.max_grad_norm",
    "algorithm": "learner.recipe",
    "adv_estimator": "learner.advantage",
    "advantage_estimator": "learner.advantage",
    "loss_type": "learner.loss",
    "loss_mode": "learner.loss",
    "loss_agg_mode": "loss.aggregate",
    "clip_ratio_low": "learner.clip_low",
    "clip_ratio_high": "learner.clip_high",
    "epsilon_high": "learner.clip_high",
    "clip_ratio_c": "learner.dual_clip",
    "lam": "learner.gae_lambda",
    "lambd": "learner.gae_lambda",
    "kl_loss_coef": "kl.coefficient",
    "beta": "kl.coefficient",
    "kl_target": "kl.target",
    "target_kl": "kl.target",
    "kl_estimator": "kl.form",
    "kl_penalty": "kl.form",
    "normalize_reward": "rewards.normalize",
    "reward_clip_range": "rewards.clip",
    "overlong_buffer_len": "rewards.overlong_buffer_tokens",
    "overlong_penalty_factor": "rewards.overlong_penalty",
    "mask_truncated_completions": "rewards.truncated",
    "lr_warmup_steps_ratio": "learner.lr_warmup_ratio",
    "warmup_ratio": "learner.lr_warmup_ratio",
    "algo": "learner.recipe",
    "batch_size": "learner.groups_per_step",
    "train_batch_size": "learner.groups_per_step",
    "rollout_batch_size": "learner.groups_per_step",
    "micro_batch_size": "learner.micro_batch_tokens",
    "save_steps": "learner.checkpoint_every_steps",
    "save_freq": "learner.checkpoint_every_steps",
    "save_interval": "learner.checkpoint_every_steps",
    "eps_clip": "learner.clip_low",
    "clip_ratio": "learner.clip_low",
    "num_gpus": "learner.num_ranks",
    "world_size": "learner.num_ranks",
    "num_generations": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "num_samples": "rollout.group_size",
    "n": "rollout.group_size",
    "max_tokens": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "generate_max_len": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_model_len": "rollout.max_context_tokens",
    "max_length": "rollout.max_context_tokens",
    "tp": "rollout.tensor_parallel_size",
    "num_engines": "rollout.num_servers",
    "vllm_num_engines": "rollout.num_servers",
    "vllm_args": "rollout.engine_args",
    "env": "rollout.environment",
    "model": "policy.model",
    "model_name_or_path": "policy.model",
    "critic_pretrain": "critic.model",
    "critic_learning_rate": "critic.lr",
    "critic_warmup": "critic.warmup_steps",
    "ppo_mini_batch_size": "learner.num_mini_batches",
    "ppo_epochs": "learner.num_epochs",
    "init_kl_coef": "kl.coefficient",
    "kl_coef": "kl.coefficient",
    "model_path": "policy.model",
    "pretrain": "policy.model",
    "torch_dtype": "policy.dtype",
    "precision": "policy.dtype",
    "train_files": "data.train",
    "prompt_data": "data.train",
    "train_file": "data.train",
    "dataset": "data.train",
    "val_files": "data.eval",
    "eval_dataset": "data.eval",
    "input_key": "data.prompt_key",
    "input_template": "data.template",
    "prompt_template": "data.template",
    "max_samples": "data.max_prompts",
    "train_max_samples": "data.max_prompts",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "filter_overlong_prompts": "data.overlong",
    "truncation": "data.overlong",
    "prompt_data_probs": "data.train",
    "prompts": "data.train",
    "reward_url": "rewards.endpoints",
    "remote_rm_url": "rewards.endpoints",
    "output_dir": "run.dir",
    "save_path": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "total_training_steps": "run.max_steps",
    "num_steps": "run.max_steps",
    "steps": "run.max_steps",
    "resume_from_checkpoint": "run.resume",
    "eval_steps": "eval.every_steps",
    "test_freq": "eval.every_steps",
    "wandb": "report.wandb_project",
    "use_wandb": "report.wandb_project",
    "project": "report.wandb_project",
    "project_name": "report.wandb_project",
}


# Settings of version 0.1 that this version does not have.
_REMOVED = {
    "learner.proof_timeout_s",
    "learner.prove_checkpoints",
    "learner.sequence_parallel",
    "policy.lora.push",
    "policy.lora.quantize",
    "rewards.shadow_wait_s",
}


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """Return the sentence about a name that is not among the `known` dotted names, with the likeliest one."""
    if name in _REMOVED and name not in known:
        return f"settings: {name} does not exist any more. Remove it."
    if "." in name and name in known:
        section, key = name.split(".", 1)
        below = f"{section}: {{{key}: ..}}"
        return f"settings: {name} is written as one key. In a YAML file it goes below its section: {below}."
    likeliest = _likeliest(name, known)
    hint = f"Did you mean {likeliest}?" if likeliest else "--help lists every setting."
    return f"settings: {name} does not exist. {hint}"


def _likeliest(name: str, known: Sequence[str]) -> str | None:
    """Try in this order: a map setting with a key appended; another trainer's name; another section; a misspelling."""
    for setting in known:
        if "." in setting and name.startswith(f"{setting}."):
            return setting
    last = name.rpartition(".")[2].replace("-", "_")
    if _ELSEWHERE.get(last) in known:
        return _ELSEWHERE[last]
    same = [setting for setting in known if setting.rpartition(".")[2] == last]
    if same:
        return min(same, key=len)
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None
