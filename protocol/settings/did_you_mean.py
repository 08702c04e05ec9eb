"""The most likely setting for a name that does not exist."""

import difflib
import re
from collections.abc import Mapping, Sequence

HELP_ALL = "sluice run --help all lists every setting."
# Setting -> its names in other trainers.
_ELSEWHERE = {
    "learner.lr": "learning_rate actor_learning_rate optim.lr",
    "learner.lr_warmup_steps": "warmup_steps num_warmup_steps",
    "learner.lr_schedule": "lr_scheduler_type",
    "learner.max_grad_norm": "grad_clip max_norm",
    "learner.recipe": "algorithm algo",
    "learner.advantage": "adv_estimator advantage_estimator",
    "learner.loss": "loss_type loss_mode",
    "loss.aggregate": "loss_agg_mode",
    "learner.clip_low": "clip_ratio_low eps_clip clip_ratio epsilon",
    "learner.clip_high": "clip_ratio_high epsilon_high eps_clip_low_high",
    "learner.dual_clip": "clip_ratio_c",
    "learner.gae_lambda": "lam lambd",
    "kl.coefficient": "kl_loss_coef beta init_kl_coef kl_coef kl_tau",
    "kl.target": "kl_target target_kl",
    "kl.form": "kl_estimator kl_penalty kl_loss_type",
    "rewards.normalize": "normalize_reward",
    "rewards.clip": "reward_clip_range",
    "rewards.overlong_buffer_tokens": "overlong_buffer_len",
    "rewards.overlong_penalty": "overlong_penalty_factor",
    "rewards.truncated": "mask_truncated_completions",
    "learner.lr_warmup_ratio": "lr_warmup_steps_ratio warmup_ratio",
    "learner.groups_per_step": "batch_size train_batch_size rollout_batch_size generation_batch_size",
    "learner.checkpoint_every_steps": "save_steps save_freq save_interval ckpt.interval",
    "learner.num_ranks": "num_gpus world_size n_gpus_per_node actor_num_gpus_per_node",
    "rollout.group_size": "num_generations n_samples_per_prompt num_samples n rollouts_per_example",
    "rollout.max_response_tokens": "max_tokens max_new_tokens generate_max_len max_completion_length "
    "max_response_length",
    "rollout.max_context_tokens": "max_model_len max_length seq_len",
    "rollout.tensor_parallel_size": "tp tensor_model_parallel_size vllm_tensor_parallel_size",
    "rollout.num_servers": "num_engines vllm_num_engines",
    "rollout.engine_args": "vllm_args",
    "rollout.environment": "env env.id",
    "policy.model": "model model_name_or_path model_path pretrain model.path model.name",
    "critic.model": "critic_pretrain",
    "critic.lr": "critic_learning_rate critic.optim.lr",
    "critic.warmup_steps": "critic_warmup",
    "learner.num_epochs": "ppo_epochs num_iterations",
    "policy.dtype": "torch_dtype precision",
    "data.train": "train_files prompt_data train_file dataset prompt_data_probs prompts dataset_name",
    "data.eval": "val_files eval_dataset",
    "data.prompt_key": "input_key",
    "data.template": "input_template prompt_template",
    "data.max_prompts": "max_samples train_max_samples",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "data.overlong": "filter_overlong_prompts",
    "rollout.truncate_left": "truncation",
    "rewards.endpoints": "reward_url remote_rm_url reward_funcs",
    "run.dir": "output_dir save_path",
    "run.name": "run_name experiment_name",
    "run.max_steps": "total_training_steps num_steps steps",
    "run.max_epochs": "num_train_epochs total_epochs num_episodes",
    "run.resume": "resume_from_checkpoint",
    "eval.every_steps": "eval_steps test_freq eval.interval",
    "report.wandb_project": "wandb use_wandb project project_name",
    "report.tensorboard": "tensorboard use_tensorboard",
    "filter.dynamic_sampling": "filter_groups dynamic_filtering",
    "learner.max_staleness": "max_async_level max_off_policy_steps staleness_threshold",
    "policy.lora.rank": "lora_r lora_rank",
    "policy.lora.alpha": "lora_alpha",
    "placement.ranks.nodes": "nnodes num_nodes",
    "learner.offload": "adam_offload param_offload optimizer_offload",
}
# Name in another trainer: the change that does the same here.
_OTHERWISE = {
    "bf16": "Set policy.dtype to bfloat16.",
    "use_vllm": "Servers always use vLLM. Remove it.",
    "async_train": "Training is always asynchronous; learner.max_staleness 0 waits. Remove it.",
    "flash_attn": "The kernel is chosen for the device. Remove it.",
    "ppo_mini_batch_size": "Set learner.num_mini_batches, a number of batches, not their size.",
    "use_kl_loss": "Set kl.coefficient above 0, and kl.place to loss.",
    "use_kl_in_reward": "Set kl.coefficient above 0, and kl.place to reward.",
    "logging_steps": "Every step is logged. Remove it.",
    "scale_rewards": "Set learner.recipe to dr_grpo for advantages without their deviation.",
    "custom_reward_function.path": "Run sluice serve-reward --function FILE.py, and give its URL in rewards.endpoints.",
    "entropy_coeff": "No loss has an entropy term. Remove it; a higher learner.clip_high keeps entropy.",
    "per_device_train_batch_size": "Set learner.groups_per_step, the prompts of a step on all ranks.",
    "use_peft": "Set policy.lora.rank above 0.",
}
for _names, _change in {
    "gpu_memory_utilization vllm_gpu_memory_utilization": """Give it to vLLM: --rollout.engine_args \
'{"gpu_memory_utilization": 0.6}'.""",
    "micro_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu gradient_accumulation_steps": (
        "Set learner.micro_batch_tokens, a number of tokens, not of samples."
    ),
    # settings of version 0.1.0
    "float32_head prove_checkpoints proof_timeout_s sequence_parallel push quantize shadow_wait_s": "Remove it.",
    "load_in_4bit load_in_8bit": "The base stays in policy.dtype. Set policy.lora.rank, and learner.zero_stage 3 to "
    "divide it over the ranks.",
    "reward_pretrain": "Start the model with sluice start --reward-scorer reward_model:MODEL.",
    "shadow": "Remove it, and give the endpoint weight 0.",
    "eval_strategy do_eval": "Set eval.every_steps; 0: no evaluation.",
    "val_before_train eval_on_start": "Set eval.before to true or false.",
    "report_to logger": "Set report.wandb_project for Weights & Biases, report.tensorboard for TensorBoard.",
    "colocate_all_models vllm_mode": "Set placement.devices to shared or split.",
    "actor_rollout_ref trainer": "It is a section of verl. docs/do/coming_from.md has the settings that do the same.",
}.items():
    _OTHERWISE |= dict.fromkeys(_names.split(), _change)

# Value in another trainer: its name here.
_VALUES_ELSEWHERE = {"fp32": "float32", "bf16": "bfloat16", "avg": "mean"}
BY_OTHER_NAME = {name: setting for setting, names in _ELSEWHERE.items() for name in names.split()}


def unknown_setting(name: str, known: Sequence[str]) -> str:
    """Return the sentence about a name that is not among the `known` dotted names, with the likeliest one."""
    if "." in name and name in known:
        section, key = name.split(".", 1)
        below = f"{section}: {{{key}: ..}}"
        return f"settings: {name} is written as one key. In a YAML file it goes below its section: {below}."
    if otherwise := _by_name(name, _OTHERWISE):
        return f"settings: {name} does not exist. {otherwise}"
    sections = {setting.partition(".")[0] for setting in known}
    if "." not in name and (near := difflib.get_close_matches(name, sections, n=1, cutoff=0.8)):
        return f"settings: {name} does not exist. Did you mean the section {near[0]}?"
    likeliest = _likeliest(name, known)
    hint = f"Did you mean {likeliest}?" if likeliest else HELP_ALL
    return f"settings: {name} does not exist. {hint}"


def written_as_option(text: str, known: Sequence[str]) -> str | None:
    """Return the sentence about `learner.lr=1e-6` or a file's name in place of an option; None for other texts."""
    if text == "@" or text.lstrip("@").endswith((".yaml", ".yml", ".toml", ".json")):
        return f"settings: {text} is not an option. Give a YAML file of settings as --config FILE."
    name, equals, value = text.lstrip("+").partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        return None
    if name in known:
        return f"settings: {text} is not an option. Write --{name} {value}."
    likeliest = _likeliest(name, known)
    hint = f"Write --{likeliest} {value}, if it is the same setting." if likeliest else HELP_ALL
    return f"settings: {text} is not an option. {_by_name(name, _OTHERWISE) or hint}"


def likeliest_value(given: object, expected: str) -> str:
    """Return " Did you mean VALUE?" for one of the values in `expected one of A, B or C`; "" when none is close."""
    _, listed, values = expected.partition("expected one of ")
    names = re.split(r", | or ", values) if listed else []
    alias = _VALUES_ELSEWHERE.get(str(given).lower())
    close = [alias] if alias in names else difflib.get_close_matches(str(given), names, n=1)
    return f" Did you mean {close[0]}?" if close else ""


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
    if (foreign := _by_name(name, BY_OTHER_NAME)) in known:
        return foreign
    last = name.rpartition(".")[2].replace("-", "_")
    same = [setting for setting in known if setting.rpartition(".")[2] == last]
    if same:
        return min(same, key=lambda setting: (setting.startswith("critic."), len(setting)))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return close[0] if close else None


def _by_name(name: str, table: Mapping[str, str]) -> str | None:
    """Return what a table has for the longest end of a dotted name: trainer.optim.lr, optim.lr, lr."""
    parts = name.replace("-", "_").split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((table[end] for end in ends if end in table), None)
