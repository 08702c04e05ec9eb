"""verl's and Search-R1's options that change together, and verl's fine-tuning."""

import math

from deploy.migrate import joint
from deploy.migrate.convert import Draft, texts_of
from deploy.migrate.off_policy import batches_per_push, is_fully_async, write_correction, write_staleness, write_step

_ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "opo": "opo",
}
_LOSSES = {"vanilla": "ppo", "ppo": "ppo", "gspo": "gspo", "cispo": "cispo"}
_KL_FORMS = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
_NO_LIMIT = 1000  # turns
_FORMATS = {"qwen": "hermes", "qwen25": "hermes", "gpt-oss": "openai"}  # names of vLLM's parsers


def convert_rl(draft: Draft) -> None:
    """Write the settings of an RL command of verl."""
    size = int(draft.number("rollout.n", 1))
    draft.put("rollout.group_size", size, "rollout.n")
    write_step(draft, size)
    prompt, answer = draft.number("data.max_prompt_length", 512), draft.number("data.max_response_length", 512)
    lengths = ("data.max_prompt_length", "data.max_response_length")
    draft.put("data.max_prompt_tokens", int(prompt), lengths[0])
    draft.put("rollout.max_response_tokens", int(answer), lengths[1], why="of one turn")
    draft.put("rollout.max_context_tokens", int(draft.number("rollout.max_model_len", prompt + answer)), *lengths)
    _write_kl(draft, is_default=False)
    _write_environment(draft)
    _write_rl(draft)


def convert_search_r1(draft: Draft) -> None:
    """Write the settings of a Search-R1 command."""
    prompts, size = int(draft.number("data.train_batch_size", 1024)), int(draft.number("rollout.n_agent", 1))
    size *= int(draft.number("rollout.n", 1))
    draft.put("rollout.group_size", size, "rollout.n_agent", "rollout.n")
    samples, epochs = draft.number("actor.ppo_mini_batch_size", 256), int(draft.number("actor.ppo_epochs", 1))
    joint.put_step(draft, prompts, size, samples, "data.train_batch_size", "actor.ppo_mini_batch_size", epochs)
    whole, answer = draft.number("data.max_prompt_length", 512), draft.number("data.max_response_length", 512)
    why = "its longest input of a turn and an answer; there the input loses its beginning"
    lengths = ("data.max_prompt_length", "data.max_response_length")
    draft.put("rollout.max_context_tokens", int(whole + answer), *lengths, why=why)
    draft.put("rollout.max_response_tokens", int(answer), "data.max_response_length", why="of one turn")
    draft.put("data.max_prompt_tokens", int(draft.number("data.max_start_length", 256)), "data.max_start_length")
    searches = draft.is_on("do_search", True)
    draft.put("rollout.environment", "search" if searches else "single_turn", "do_search")
    if searches:
        draft.put("rollout.max_turns", int(draft.number("max_turns", 10)), "max_turns")
        draft.put("retriever.topk", int(draft.number("retriever.topk", 3)), "retriever.topk")
        draft.put("retriever.url", draft.text("retriever.url", "http://127.0.0.1:8000/retrieve"), "retriever.url")
        draft.put("retriever.words", "search_r1", why="the words of Search-R1's prompts")
    for name in ("max_turns", "retriever.topk", "retriever.url"):
        draft.read.add(name)
    draft.steps.append("sluice start --reward-scorer exact_match, which scores as its qa_em does")
    joint.put_default_lack(draft, "actor.entropy_coeff", 0.001, draft.options["actor.entropy_coeff"].conversion)
    _write_kl(draft, is_default=True)
    _write_rl(draft)


def convert_rows(draft: Draft) -> None:
    """Write the settings of a fine-tuning command."""
    draft.put("objective", "sft")
    joint.put_launched_ranks(draft, "num_machines", "num_processes")
    draft.put("learner.zero_stage", 3, why="as FSDP")
    _write_lowest(draft, "optim", 1e-5)
    _write_warm_up(draft, "actor.optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio", 0.1)
    joint.put_whole_rows(draft, "data.max_length", 1024)
    _write_length(draft, 4)
    _write_data(draft)
    _write_reports(draft)
    joint.put_kept_checkpoints(draft, "trainer.max_ckpt_to_keep")


def _write_rl(draft: Draft) -> None:
    """Write what both forms of RL have."""
    _write_algorithm(draft)
    if "model.lora.rank" in draft.asked and "model.lora.alpha" not in draft.asked:  # Megatron's adapters
        draft.put("policy.lora.alpha", 32, "model.lora.alpha")
    write_correction(draft)
    write_staleness(draft)
    _write_placement(draft)
    _write_rewards(draft)
    _write_length(draft, 30)
    _write_warm_up(draft, "actor.optim.lr_warmup_steps", "actor.optim.lr_warmup_steps_ratio")
    _write_lowest(draft, "actor.optim", 1e-6)
    _write_critic(draft)
    _write_data(draft)
    _write_reports(draft)
    joint.put_kept_checkpoints(draft, "trainer.max_actor_ckpt_to_keep")


def _write_warm_up(draft: Draft, steps: str, share: str, default: float = 0) -> None:
    """Write the warm-up. steps, share: its options, of which the first one counts unless it is below 0."""
    number, ratio, parts = draft.number(steps, -1), draft.number(share, default), batches_per_push(draft)
    if number >= 0:
        why = f"its schedule counts each of the {parts:g} batches of a step" if parts > 1 else ""
        draft.put("learner.lr_warmup_steps", math.ceil(number / parts), steps, why=why)
        if share in draft.asked:
            draft.always[draft.label(share)] = "The number of steps decides the warm-up"
    elif ratio:
        draft.put("learner.lr_warmup_ratio", ratio, share)


def _write_lowest(draft: Draft, section: str, rate: float) -> None:
    """Write the last learning rate, where it is not given as a share. rate: the section's default."""
    if lowest := draft.number(f"{section}.min_lr", 0):
        share = lowest / (draft.number(f"{section}.lr", rate) or 1)
        draft.put("learner.min_lr_ratio", share, f"{section}.min_lr", f"{section}.lr")


def _write_critic(draft: Draft) -> None:
    """Write the warm-ups of the critic."""
    steps, share, alone = "critic.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps_ratio", "trainer.critic_warmup"
    number, ratio, parts = draft.number(steps, -1), draft.number(share, 0), batches_per_push(draft)
    whole = draft.settings.get("run.max_steps", (0, ""))[0]
    for name, default in (("ppo_mini_batch_size", 256), ("ppo_epochs", 1)):
        policys = draft.number(f"actor.{name}", default)
        if draft.settings.get("learner.advantage", ("", ""))[0] != "gae":
            draft.read.add(f"critic.{name}")
        elif draft.number(f"critic.{name}", policys) != policys:
            draft.lack(f"critic.{name}", "The critic has as many updates as the policy")
    if number >= 0:
        draft.put("critic.lr_warmup_steps", math.ceil(number / parts), steps)
    elif ratio and whole:
        draft.put("critic.lr_warmup_steps", round(ratio * whole), share)
    elif ratio:
        draft.lack(share, "Set critic.lr_warmup_steps to this share of the run's steps")
    first = draft.number(alone, 0)
    if first > 0:
        why = "there the number of the policy's first step"
        draft.put("critic.warmup_steps", math.ceil((first - 1) / parts), alone, why=why)


def _write_algorithm(draft: Draft) -> None:
    name = draft.text("algorithm.adv_estimator", "gae")
    if _ADVANTAGES.get(name) == "grpo" and not draft.is_on("algorithm.norm_adv_by_std_in_grpo", True):
        draft.put("learner.advantage", "dr_grpo", "algorithm.norm_adv_by_std_in_grpo")
    elif name in _ADVANTAGES:
        draft.put("learner.advantage", _ADVANTAGES[name], "algorithm.adv_estimator")
    else:
        draft.lack("algorithm.adv_estimator", "learner.advantage has no such name")
    draft.read.add("algorithm.norm_adv_by_std_in_grpo")
    loss = draft.text("actor.policy_loss.loss_mode", "vanilla")
    if loss in _LOSSES:
        draft.put("learner.loss", _LOSSES[loss], "actor.policy_loss.loss_mode")
    else:
        draft.lack("actor.policy_loss.loss_mode", "learner.loss has no such name")
    both = draft.number("actor.clip_ratio", 0.2)
    if draft.trainer == "verl" and both != 0.2:  # its configuration has a value for each side
        draft.always[draft.label("actor.clip_ratio")] = "clip_ratio_low and clip_ratio_high, 0.2 there, decide"
        both = 0.2
    for side in ("low", "high"):
        name = f"actor.clip_ratio_{side}"
        draft.put(f"learner.clip_{side}", draft.number(name, both), name if name in draft.asked else "actor.clip_ratio")
    aggregate = draft.settings["loss.aggregate"][0] if "loss.aggregate" in draft.settings else ""
    is_bypass = draft.is_on("algorithm.rollout_correction.bypass_mode")
    if loss == "gspo" and aggregate != "seq_mean_token_mean" and not is_bypass:
        draft.put("loss.aggregate", "seq_mean_token_mean", why="verl's gspo has no other")
    elif aggregate == "seq_sum_norm":
        draft.put("loss.aggregate", aggregate, "actor.loss_agg_mode", why="the mean over answers; there their sum")
    _write_filter(draft)


def _write_filter(draft: Draft) -> None:
    metric, most = draft.text("algorithm.filter_groups.metric", "reward"), "algorithm.filter_groups.max_num_gen_batches"
    step = max(1, draft.settings["learner.groups_per_step"][0])
    batches, size = draft.number(most, 0), draft.number("data.gen_batch_size", step) or step
    if draft.is_on("algorithm.filter_groups.enable"):
        why = f"of {size:g} prompts there, in steps here" if size != step else ""
        replaced = max(1, math.ceil(batches * size / step) - 1) if batches > 0 else 0
        draft.put("filter.max_replaced", replaced, most, why=why)
        if metric not in ("reward", "seq_reward", "seq_final_reward"):
            reason = "filter.score reward reads a service's `scores`"
            draft.always[draft.label("algorithm.filter_groups.metric")] = reason


def _write_kl(draft: Draft, *, is_default: bool) -> None:
    """Write the KL. is_default: it is in the reward unless it is in the loss, as in the first versions."""
    names = ("actor.kl_loss_coef", "actor.kl_loss_type", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    draft.read |= {*names, "algorithm.use_kl_in_reward"}
    if draft.is_on("actor.use_kl_loss"):
        if draft.trainer == "verl" and draft.is_on("algorithm.use_kl_in_reward"):
            draft.lack("algorithm.use_kl_in_reward", "There is one KL, and it is in the loss")
        place, weight, form = "loss", draft.number(names[0], 0.001), draft.text(names[1], "low_var_kl")
        draft.put("kl.place", place, "actor.use_kl_loss")
        used = names[:2]
    elif draft.is_on("algorithm.use_kl_in_reward", is_default):
        place, weight, form = "reward", draft.number(names[2], 0.001), draft.text(names[3], "kl")
        draft.put("kl.place", place, "algorithm.use_kl_in_reward")
        used = names[2:]
    else:
        draft.put("kl.coefficient", 0, "actor.use_kl_loss", "algorithm.use_kl_in_reward")
        for name in names:
            if name in draft.asked:
                draft.always[draft.label(name)] = "No KL is on"
        return
    draft.put("kl.coefficient", weight, used[0])
    for name in names:  # their order: a set's differs from one start to the next
        if name in draft.asked and name not in used:
            draft.always[draft.label(name)] = f"The KL is in the {place}"
    if place == "loss" and form.endswith("+") and _KL_FORMS.get(form[:-1]) == "k3":
        draft.put("kl.form", "k2", used[1], why="whose gradient it has")
        return
    form = form.removesuffix("+")
    if place == "loss" and _KL_FORMS.get(form) == "k1":
        draft.put("kl.form", "k2", used[1], why="k1 has no gradient in the loss; k2's is that of its mean")
    elif form in _KL_FORMS:
        draft.put("kl.form", _KL_FORMS[form], used[1])
    else:
        draft.lack(used[1], "kl.form has no such value")


def _write_placement(draft: Draft) -> None:
    nodes, gpus = int(draft.number("trainer.nnodes", 1)), int(draft.number("trainer.n_gpus_per_node", 8))
    joint.put_ranks(draft, nodes, gpus, "trainer.nnodes", "trainer.n_gpus_per_node")
    names = ["trainer.nnodes", "trainer.n_gpus_per_node", "rollout.tensor_model_parallel_size"]
    is_split = draft.number("rollout.nnodes", 0) > 0
    if is_split:
        names[:2] = "rollout.nnodes", "rollout.n_gpus_per_node"
        nodes, gpus = int(draft.number(names[0])), int(draft.number(names[1], gpus))
    draft.put("placement.devices", "split" if is_split else "shared", "rollout.nnodes" if is_split else "hybrid_engine")
    size = int(draft.number(names[2], 2))
    why = f"{size} there: here a server's GPUs are of one node" if size > gpus else ""
    size = min(size, gpus)
    draft.put("rollout.tensor_parallel_size", size, names[2], why=why)
    draft.put("rollout.num_servers", max(1, nodes * gpus // max(1, size)), *names)
    draft.put("learner.zero_stage", 3, why="as FSDP")
    weights, state = "actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload"
    if draft.is_on(weights):
        draft.put("learner.offload", "all", weights)
    elif draft.is_on(state):
        draft.put("learner.offload", "optimizer", state)
    draft.read |= {weights, state, "hybrid_engine", "rollout.n_gpus_per_node"}


def _write_environment(draft: Draft) -> None:
    tools, prefix = draft.text("rollout.multi_turn.tool_config_path"), "rollout.multi_turn."
    own = draft.text("rollout.agent.default_agent_loop", "single_turn_agent")
    if tools:
        draft.put("rollout.environment", f"verl_tools:{tools}", f"{prefix}tool_config_path")
    elif own not in ("single_turn_agent", "tool_agent"):
        draft.lack("rollout.agent.default_agent_loop", "Write it as an environment: rollout.environment FILE.py:Class")
    names = (f"{prefix}max_assistant_turns", f"{prefix}max_user_turns")
    limits = [draft.number(names[0], 0) - 1, draft.number(names[1], 0)]
    interaction = draft.text(f"{prefix}interaction_config_path")
    if tools or interaction:
        known = [int(limit) for limit in limits if limit > 0]
        turns = "turns with a call" if not interaction else "turns"
        why = f"{turns}, before the last one" if known else "no limit there"
        draft.put("rollout.max_turns", min(known, default=_NO_LIMIT), *names, why=why)
    if tools:
        _write_calls(draft, prefix)
    if tools and interaction:
        problem = "Here one environment has the tools or the interaction. Write one with both: rollout.environment"
        draft.lack(f"{prefix}interaction_config_path", f"{problem} FILE.py:Class")
    for name in (*names, f"{prefix}enable", f"{prefix}max_parallel_calls", f"{prefix}format"):
        draft.read.add(name)
        if not tools and not interaction and name in draft.asked:
            draft.always[draft.label(name)] = "There are no tools"


def _write_calls(draft: Draft, prefix: str) -> None:
    """Write the calls of a turn and their replies. prefix: of verl's options about several turns."""
    calls, form, reply = (f"{prefix}{name}" for name in ("max_parallel_calls", "format", "max_tool_response_length"))
    draft.put("tools.max_calls_per_turn", int(draft.number(calls, 1)), calls)
    draft.put("tools.call_format", _FORMATS.get(name := draft.text(form, "hermes"), name), form)
    if reply not in draft.asked:
        draft.put("rollout.max_observation_tokens", 256, reply, why="256 characters there")
    whole, answer = "data.max_response_length", draft.settings["rollout.max_response_tokens"][0]
    draft.put("rollout.max_response_tokens", answer, whole, why="of one turn; there of all turns with their replies")


def _write_rewards(draft: Draft) -> None:
    if path := draft.text("custom_reward_function.path"):
        function = draft.text("custom_reward_function.name", "compute_score")
        names = ("custom_reward_function.path", "custom_reward_function.name")
        joint.put_rewards(draft, [f"{path}:{function}"], (), *names)
    elif draft.trainer == "verl":
        draft.steps.append("serve a reward: verl chooses a function by the column data_source (docs/do/rewards.md)")
    draft.read |= {"custom_reward_function.name", "reward_model.model.path"}
    if draft.is_on("reward_model.enable") and "rewards.endpoints" in draft.settings:
        draft.lack("reward_model.enable", "The function scores alone: it may call a service of the model")
    elif draft.is_on("reward_model.enable"):
        joint.put_reward_model(draft, draft.text("reward_model.model.path", "MODEL"), "reward_model.model.path")
    elif "reward_model.model.path" in draft.asked:
        draft.always[draft.label("reward_model.model.path")] = "No reward model is on"
    prefix = "reward_model.overlong_buffer."
    tokens, penalty = draft.number(f"{prefix}len", 0), draft.number(f"{prefix}penalty_factor", 1.0)
    if draft.is_on(f"{prefix}enable"):
        draft.put("rewards.overlong_buffer_tokens", int(tokens), f"{prefix}len")
        draft.put("rewards.overlong_penalty", penalty, f"{prefix}penalty_factor")
    manager = draft.text("reward_model.reward_manager", "naive")
    if manager in ("naive", "dapo", "batch"):
        draft.read.add("reward_model.reward_manager")
    else:
        draft.lack("reward_model.reward_manager", "A reward function of yours does the same")


def _write_length(draft: Draft, epochs: int) -> None:
    steps, whole = draft.number("trainer.total_training_steps", 0), "rollout.total_rollout_steps"
    passes = draft.number("trainer.total_epochs", epochs)
    if is_fully_async(draft):
        if steps:
            draft.always[draft.label("trainer.total_training_steps")] = f"{whole} decides the length there"
        passes, steps = min(passes, draft.number("rollout.total_epochs", passes)), draft.number(whole, 0)
        why = f"{steps:g} prompts there, and at most {passes:g} passes over data.train"
        steps = math.ceil(steps / max(1, draft.settings["learner.groups_per_step"][0]))
        draft.put(*("run.max_steps", steps) if steps else ("run.max_epochs", passes), whole, why=why if steps else "")
    elif steps:
        why = f"and at most {passes:g} passes over data.train there"
        draft.put("run.max_steps", int(steps), "trainer.total_training_steps", why=why)
    else:
        why = "there a pass leaves out the rows that do not fill a last step"
        draft.put("run.max_epochs", passes, "trainer.total_epochs", why=why)
    if steps and "trainer.total_epochs" in draft.asked:
        draft.always[draft.label("trainer.total_epochs")] = "The number of steps decides the length"
    draft.read |= {"rollout.total_epochs", whole}
    mode = draft.text("trainer.resume_mode", "auto")
    if mode == "disable":
        draft.put("run.resume", "never", "trainer.resume_mode")


def _write_data(draft: Draft) -> None:
    joint.put_data(
        draft,
        "data.train",
        [joint.data_path(path, "train") for path in texts_of(draft.text("data.train_files"))],
        "data.train_files",
    )
    held_out = [joint.data_path(path, "test") for path in texts_of(draft.text("data.val_files"))]
    frequency = "rollout.test_freq" if "rollout.test_freq" in draft.asked else "trainer.test_freq"
    every, first = draft.number(frequency, -1), draft.is_on("trainer.val_before_train", True)
    if frequency != "trainer.test_freq" and "trainer.test_freq" in draft.asked:
        draft.read.add("trainer.test_freq")
        draft.always[draft.label("trainer.test_freq")] = "rollout.test_freq decides"
    if held_out and (every > 0 or first) and draft.text("data.val_files") != "null":
        joint.put_data(draft, "data.eval", held_out, "data.val_files")
        why = "" if every > 0 else "never; there once, before the first step"
        draft.put("eval.every_steps", max(0, int(every)), frequency, why=why)
        draft.put("eval.before", first, "trainer.val_before_train")
        if "objective" not in draft.settings:
            draft.put("eval.samples", int(draft.number("rollout.val_kwargs.n", 1)), "rollout.val_kwargs.n")
        temperature = draft.number("rollout.val_kwargs.temperature", 0)
        if temperature > 0:
            draft.lack("rollout.val_kwargs.temperature", "Samples have rollout.temperature; eval.sets takes its own")
        joint.put_evaluated_rows(draft)
    else:
        names = (
            "data.val_files",
            frequency,
            "trainer.val_before_train",
            "rollout.val_kwargs.n",
            "rollout.val_kwargs.temperature",
        )
        joint.put_no_evaluation(draft, *names)
    cut = draft.text("data.truncation", "error")
    if cut == "left":
        draft.put("rollout.truncate_left", True, "data.truncation")
    elif cut != "error":
        draft.lack("data.truncation", "Nearest: rollout.truncate_left")
    if "objective" not in draft.settings:
        skips = draft.is_on("data.filter_overlong_prompts", draft.trainer == "Search-R1")
        draft.put("data.overlong", "skip" if skips or cut != "error" else "refuse", "data.filter_overlong_prompts")


def _write_reports(draft: Draft) -> None:
    project = "gsm8k-sft" if "objective" in draft.settings else "verl_examples"
    for logger in texts_of(draft.text("trainer.logger", "console wandb")):
        if logger == "wandb":
            draft.put("report.wandb_project", draft.text("trainer.project_name", project), "trainer.project_name")
        elif logger == "tensorboard":
            draft.put("report.tensorboard", True, "trainer.logger")
        elif logger not in ("console", "file"):
            draft.missing[f"trainer.logger {logger}"] = "Metrics go to metrics.jsonl, W&B, TensorBoard and Prometheus"
    draft.read.add("trainer.project_name")
