"""Combinations of settings that contradict each other. Each is a sentence with the reason and the change to make."""

import difflib
import math
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from protocol.settings.data import entries_of
from protocol.settings.effects import find_without_effect
from protocol.settings.evaluation import MAIN_SET
from protocol.settings.learner import ADVANTAGES_OF_GROUPS, ADVANTAGES_OF_TOKENS
from protocol.settings.placement import check_placement
from protocol.settings.tools import BUNDLED_TOOLS

if TYPE_CHECKING:
    from protocol.settings.settings import Settings

# The KL controller limits the relative error of the KL to this: learner/algorithms/kl.py.
_LARGEST_KL_ERROR = 0.2
# Difference of an answer's mean logprob between engine and learner in bfloat16, measured as up to 1.2e-3 nats.
_ENGINE_NOISE = 5e-3
# Largest number of samples in a message to a rank (protocol.wire.messages.Batch).
_MAX_STEP_SAMPLES = 1 << 20


# Keys of DeepSpeed's configuration that the learner sets itself. Others could scale or clip gradients a second time.
_OF_THE_LEARNER = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "gradient_clipping gradient_allreduce_op optimizer scheduler fp16 bf16 bfloat16 amp"
)
# Its other keys. DeepSpeed 0.19 ignores unknown ones.
_OF_DEEPSPEED = (
    "zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer data_types torch_autocast "
    "steps_per_print dump_state log_level disable_python_gc disable_allgather communication_data_type "
    "prescale_gradients compile aio seq_parallel_communication_data_type gradient_predivide_factor "
    "activation_checkpointing comms_logger tensorboard wandb csv_monitor comet "
    "flops_profiler wall_clock_breakdown memory_breakdown autotuning hybrid_engine pipeline data_efficiency "
    "checkpoint dataloader_drop_last expert_parallel tensor_parallel timers use_data_before_expert_parallelism "
    "weight_quantization datastates_ckpt vocabulary_size"
)


# Settings below the given ones for objectives that learn from rows without generating.
OF_ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {"data": {"form": "demonstrations"}, "rollout": {"group_size": 1}},
    "dpo": {"data": {"form": "preferences"}, "rollout": {"group_size": 2}},
    "kto": {"data": {"form": "unpaired"}, "rollout": {"group_size": 2}},
    "distill": {"data": {"form": "demonstrations"}, "rollout": {"group_size": 1}},
    "reward_model": {"data": {"form": "reward_pairs"}, "rollout": {"group_size": 2}},
}


def check_combinations(settings: "Settings") -> None:
    """Raise ValueError with the first contradiction."""
    problems = chain(
        _in_objective(settings),
        _in_groups(settings),
        _in_equal_groups(settings),
        _in_credit(settings),
        _in_loss(settings),
        _in_kl(settings),
        _in_shaping(settings),
        find_without_effect(settings),
    )
    for problem in problems:
        raise ValueError(problem)
    check_placement(settings.placement, settings.learner, settings.rollout, settings.weights)
    problems = chain(
        _in_steps(settings),
        _in_endpoints(settings),
        _in_health(settings),
        _in_deepspeed(settings.learner.deepspeed),
        _in_rollout(settings),
        _in_evaluations(settings),
        _in_filter(settings),
    )
    for problem in problems:
        raise ValueError(problem)


def _in_objective(settings: "Settings") -> Iterator[str]:
    """Find settings of generated samples in a run that learns from rows."""
    below = OF_ROWS.get(settings.objective, {"data": {"form": "prompts"}, "rollout": {"group_size": 0}})
    if settings.data.form != below["data"]["form"]:
        yield f"data.form = {settings.data.form} does not fit objective = {settings.objective}. Remove data.form."
    if settings.objective == "distill" and not settings.reference.model:
        yield "objective = distill has no teacher. Set reference.model to a model with the policy's tokenizer."
    without_use = {
        "policy.warm_start.data": settings.policy.warm_start.data,
        "data.curriculum": settings.data.curriculum.is_on,
        "eval.sets": settings.eval.sets,
        "eval.best": settings.eval.best,
        "eval.pin": settings.eval.pin,
        "rollout.group_size": settings.rollout.group_size != below["rollout"]["group_size"],
    }
    for entry in entries_of(settings.data.train):
        given = entry.model_fields_set & {"prompt_key", "label_key", "template"}
        without_use |= {f"data.train's {name}": True for name in sorted(given)}
    for name, is_given in without_use.items() if settings.is_of_rows else ():
        if is_given:
            yield (
                f"{name} has no use with objective = {settings.objective}, which generates and scores nothing. "
                "Remove it."
            )


def _in_groups(settings: "Settings") -> Iterator[str]:
    """Find an advantage that groups of this size, or without equal ones, make meaningless."""
    if settings.is_of_rows:
        return
    learner, size = settings.learner, settings.rollout.group_size
    advantage = learner.advantage or ""
    if size < ADVANTAGES_OF_GROUPS.get(advantage, 1):
        yield (
            f"rollout.group_size = {size} gives a group nothing to be compared with. "
            f"Use at least 2 samples of a prompt, or learner.recipe = ppo or reinforce_pp, which takes single ones."
        )
    if learner.equal_groups == "skip" and (size == 1 or advantage in ADVANTAGES_OF_TOKENS):
        groups = "every group of one" if size == 1 else f"groups that learner.advantage = {advantage} learns from"
        yield f"learner.equal_groups = skip would skip {groups}: their rewards are equal. Set it to keep."


def _in_equal_groups(settings: "Settings") -> Iterator[str]:
    """Find a setting that gives groups of equal rewards a gradient, while equal_groups skips them."""
    if settings.learner.equal_groups != "skip":
        return
    rewards, kl, learner = settings.rewards, settings.kl, settings.learner
    is_whitened = learner.advantage == "reinforce_pp_baseline" if learner.whiten is None else learner.whiten
    parts = (
        (rewards.overlong_buffer_tokens, f"rewards.overlong_buffer_tokens = {rewards.overlong_buffer_tokens}"),
        (rewards.truncated == "penalise", "rewards.truncated = penalise"),
        (kl.coefficient, f"kl.coefficient = {kl.coefficient}"),
        (learner.router_aux_loss, f"learner.router_aux_loss = {learner.router_aux_loss}"),
        (is_whitened, "the whitening of the step's advantages (learner.whiten)"),
    )
    for is_given, setting in parts:
        if is_given:
            yield (
                f"learner.equal_groups = skip would skip groups from which {setting} has something to learn "
                "though their services' rewards are equal. Set it to keep."
            )


def _in_credit(settings: "Settings") -> Iterator[str]:
    """Find a setting that loses or rescales rewards of single turns."""
    learner, rewards = settings.learner, settings.rewards
    if rewards.credit != "turn":
        return
    if learner.advantage in ADVANTAGES_OF_GROUPS:
        yield (
            f"rewards.credit = turn gives the tokens of an answer different rewards, and learner.advantage = "
            f"{learner.advantage} gives them one advantage. Use learner.recipe = ppo or reinforce_pp, or set "
            "rewards.credit to conversation."
        )
    if rewards.normalize:
        yield (
            "rewards.normalize = true rescales the reward of a whole conversation, and rewards.credit = turn leaves "
            "the rewards of its turns as they are. Remove one of the two."
        )
    if rewards.clip is not None:
        yield (
            f"rewards.clip = {rewards.clip:g} clips the reward of a whole conversation, and rewards.credit = turn "
            "leaves the rewards of its turns as they are: the last turn would get the difference. Remove one of the "
            "two."
        )


def _in_loss(settings: "Settings") -> Iterator[str]:
    """Find parts of the loss that undo or ignore each other."""
    learner, loss = settings.learner, settings.loss
    if learner.loss == "gspo" and learner.advantage in ADVANTAGES_OF_TOKENS:
        yield (
            f"learner.loss = gspo clips whole answers, and learner.advantage = {learner.advantage} gives each token "
            "its own. Use learner.loss = ppo, or an advantage of groups such as grpo."
        )
    is_recomputed = settings.policy.old_logprobs == "recompute"
    is_noisy = not is_recomputed and settings.policy.dtype == "bfloat16"
    if learner.loss == "gspo" and is_noisy and learner.clip_high < _ENGINE_NOISE:
        yield (
            f"learner.clip_high = {learner.clip_high:g} of gspo is less than engine and learner differ by in bfloat16 "
            "on the same weights: rounding would decide which answers learn. Set policy.old_logprobs to recompute."
        )
    if learner.loss == "cispo" and is_recomputed and learner.correction == "none":
        yield (
            "learner.correction = none with policy.old_logprobs = recompute leaves the difference between engine and "
            "learner without a correction: cispo's weight is of the learner's own logprobs then. Set "
            "learner.correction to tis, or policy.old_logprobs to behaviour."
        )
    if loss.constant is not None and loss.aggregate != "seq_sum_norm":
        yield (
            f"loss.constant = {loss.constant} divides nothing: loss.aggregate is {loss.aggregate}. "
            "Set loss.aggregate to seq_sum_norm, or loss.constant to null."
        )
    low, high = learner.correction_low, learner.correction_high
    if low is not None and high is not None and low >= high:
        yield (
            f"learner.correction_low = {low} is not below learner.correction_high = {high}: no weight is between them."
        )
    if learner.lr_warmup_steps and learner.lr_warmup_ratio:
        yield (
            f"learner.lr_warmup_steps = {learner.lr_warmup_steps} and learner.lr_warmup_ratio = "
            f"{learner.lr_warmup_ratio} both set the length of the warm-up. Set one of them to 0."
        )


def _in_kl(settings: "Settings") -> Iterator[str]:
    """Find a KL without effect, and a controller that could make its coefficient negative, which rewards the KL."""
    kl = settings.kl
    if kl.target is not None and not kl.coefficient:
        yield (
            f"kl.target = {kl.target} has nothing to adjust: kl.coefficient is 0. "
            "Set kl.coefficient to its first value, such as 0.001, or kl.target to null."
        )
    if kl.coefficient and kl.place == "loss" and kl.form == "k1":
        yield (
            "kl.form = k1 in the loss has no effect: its gradient is that of the samples' own logprobs, whose mean is "
            "0. Set kl.form to k3 or k2, or kl.place to reward."
        )
    if kl.coefficient and kl.place == "advantage" and kl.form != "k1":
        yield (
            f"kl.form = {kl.form} has no sign, and kl.place = advantage rewards tokens that the reference finds "
            "likelier than the policy. Set kl.form to k1."
        )
    num_samples = settings.learner.groups_per_step * settings.rollout.group_size
    if kl.target is not None and kl.horizon <= _LARGEST_KL_ERROR * num_samples:
        yield (
            f"kl.horizon = {kl.horizon:g} lets one step of {num_samples} samples take kl.coefficient to 0 or below. "
            f"Set it above {_LARGEST_KL_ERROR * num_samples:g}; 10000 is usual."
        )


def _in_shaping(settings: "Settings") -> Iterator[str]:
    """Find a penalty of overlong answers that every answer gets, or none."""
    rewards = settings.rewards
    budget = "rewards.overlong_max_tokens" if rewards.overlong_max_tokens else "rollout.max_response_tokens"
    most = rewards.overlong_max_tokens or settings.rollout.max_response_tokens
    if rewards.overlong_buffer_tokens >= most:
        yield (
            f"rewards.overlong_buffer_tokens = {rewards.overlong_buffer_tokens} is not below the {most} tokens of "
            f"{budget}: every answer would be penalised. Lower it."
        )
    environment = settings.rollout.environment
    if rewards.overlong_buffer_tokens and not rewards.overlong_max_tokens and environment != "single_turn":
        yield (
            f"rewards.overlong_buffer_tokens = {rewards.overlong_buffer_tokens} counts the tokens of a whole "
            f"conversation, and rollout.max_response_tokens limits one turn of rollout.environment = {environment}. "
            "Set rewards.overlong_max_tokens to a conversation's budget."
        )


def _in_steps(settings: "Settings") -> Iterator[str]:
    """Find groups that do not fit the ranks, the mini-batches or a message."""
    learner, rollout = settings.learner, settings.rollout
    if (num_samples := learner.groups_per_step * rollout.group_size) > _MAX_STEP_SAMPLES:
        yield (
            f"learner.groups_per_step = {learner.groups_per_step} times rollout.group_size = {rollout.group_size} "
            f"is {num_samples} samples in one step, at most {_MAX_STEP_SAMPLES}. Lower one of them."
        )
    if learner.groups_per_step % learner.num_ranks:
        divisors = [n for n in range(1, learner.groups_per_step + 1) if learner.groups_per_step % n == 0]
        yield (
            f"learner.groups_per_step = {learner.groups_per_step} cannot be split over {learner.num_ranks} ranks. "
            f"Use a multiple of {learner.num_ranks}, or set learner.num_ranks to one of {divisors}."
        )
    if settings.critic.offload and settings.critic.zero_stage is None and learner.zero_stage == 0:
        yield "critic.offload = true needs ZeRO stage 2 or 3, and learner.zero_stage is 0. Set critic.zero_stage."
    if learner.num_mini_batches > learner.groups_per_step:
        yield (
            f"learner.num_mini_batches = {learner.num_mini_batches} is more than "
            f"learner.groups_per_step = {learner.groups_per_step}: a mini-batch is made of whole groups. "
            "Lower the first or raise the second."
        )
    if settings.objective == "policy_gradient" and rollout.max_response_tokens >= rollout.max_context_tokens:
        yield (
            f"rollout.max_response_tokens = {rollout.max_response_tokens} leaves no room for a prompt in "
            f"rollout.max_context_tokens = {rollout.max_context_tokens}. Lower the first or raise the second."
        )


def _in_endpoints(settings: "Settings") -> Iterator[str]:
    """Find reward endpoints of one name, and weights that cannot be combined."""
    rewards, names = settings.rewards, [endpoint.name for endpoint in settings.rewards.endpoints]
    if len(set(names)) < len(names):
        yield f"rewards.endpoints has the names {names}. Give each endpoint a name of its own."
    weights = [endpoint.weight for endpoint in rewards.endpoints]
    if names and rewards.combine in ("product", "shard") and not any(weights):
        yield (
            f"rewards.combine = {rewards.combine} over endpoints that all have weight 0. Change a weight, or use sum."
        )
    if rewards.combine == "mean" and names and math.fsum(weights) == 0:
        yield "rewards.combine = mean over endpoints whose weights add up to 0. Change a weight, or use sum."


def _in_deepspeed(given: dict[str, Any]) -> Iterator[str]:
    """Find keys that other settings decide, that DeepSpeed ignores, or that break checkpoints."""
    known = _OF_DEEPSPEED.split()
    for key in given:
        if key in _OF_THE_LEARNER.split():
            yield f"learner.deepspeed sets {key}, which follows from the other settings. Remove it."
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Remove it."
            yield f"learner.deepspeed sets {key}, which DeepSpeed does not have. {hint}"
    zero = given.get("zero_optimization") or {}
    if not isinstance(zero, dict):
        yield f"learner.deepspeed sets zero_optimization = {zero}, expected a map of settings."
        return
    if "stage" in zero:
        yield (
            "learner.deepspeed sets zero_optimization.stage, which learner.zero_stage decides. Remove it, and set "
            "learner.zero_stage."
        )
    if zero.get("round_robin_gradients"):
        yield (
            "learner.deepspeed sets zero_optimization.round_robin_gradients, with which a rank's part of a parameter "
            "is not where checkpoints read it. Remove it."
        )
    if (zero.get("offload_optimizer") or {}).get("device") == "nvme":
        yield (
            "learner.deepspeed keeps the optimizer on NVMe, where a checkpoint cannot read it. Set "
            "zero_optimization.offload_optimizer.device to cpu."
        )


def _in_health(settings: "Settings") -> Iterator[str]:
    """Find a stop by an alarm that can never begin, or begins later than the stop."""
    health = settings.health
    if health.stop_after and (not health.alarms or health.stop_after < health.patience):
        yield (
            f"health.stop_after = {health.stop_after} ends a run by an alarm, which begins after health.patience = "
            f"{health.patience} steps{'' if health.alarms else ' and is turned off (health.alarms)'}. "
            "Raise the first, lower the second, or set health.alarms to true."
        )


def _in_rollout(settings: "Settings") -> Iterator[str]:
    """Find sampling that training cannot use, and an environment without tools to call."""
    reshaping = settings.sampling.reshaping
    if reshaping and settings.run.max_steps and not settings.sampling.only_eval:
        name, value = next(iter(reshaping.items()))
        yield (
            f"sampling.{name} = {value} draws from another distribution than the policy's: the learner's probability "
            "of a token is not that of its sampling, and every ratio is wrong. Remove it, or set sampling.only_eval to "
            "true."
        )
    if settings.rollout.environment == "tools" and settings.tools.is_empty:
        yield (
            "rollout.environment = tools, and tools.names, http and mcp are empty: the policy could call nothing. "
            f"Name some of {', '.join(BUNDLED_TOOLS)}, or set rollout.environment to single_turn."
        )


def _in_evaluations(settings: "Settings") -> Iterator[str]:
    """Find evaluations without prompts, and a best evaluation without a checkpoint."""
    every, saved = settings.eval.every_steps, settings.learner.checkpoint_every_steps
    if settings.eval.answers and (settings.run.max_steps or not settings.data.eval or settings.eval.sets):
        yield (
            f"eval.answers = {settings.eval.answers} is for a run of no steps on data.eval alone. Use sluice generate."
        )
    if every and not settings.data.eval and not settings.eval.sets:
        yield (
            f"eval.every_steps = {every} needs held-out prompts. Set data.eval or eval.sets, or eval.every_steps to 0."
        )
    if (settings.eval.best or "").startswith(f"eval/{MAIN_SET}/") and not settings.data.eval:
        yield f"eval.best = {settings.eval.best} is a metric of data.eval, which is not set. Name a set of eval.sets."
    if settings.eval.best is not None and (not saved or every % saved):
        yield (
            f"eval.best = {settings.eval.best} keeps the best evaluation's checkpoint, but with eval.every_steps = "
            f"{every} and learner.checkpoint_every_steps = {saved} not every evaluated step has one. Set the first "
            "to a multiple of the second."
        )


def _in_filter(settings: "Settings") -> Iterator[str]:
    """Find a filter, or a curriculum, without scores to judge by."""
    chosen, weights = settings.filter, {endpoint.name: endpoint.weight for endpoint in settings.rewards.endpoints}
    if not (chosen.dynamic_sampling or settings.data.curriculum.is_on):
        return
    if chosen.dynamic_sampling and settings.rollout.group_size < 2:
        yield (
            f"filter.dynamic_sampling judges a prompt by its group, and rollout.group_size = "
            f"{settings.rollout.group_size}. Use at least 2 samples of a prompt, or turn the filter off."
        )
    if chosen.score in ("reward", "environment"):
        return
    if weights and chosen.score not in weights:
        yield (
            f"filter.score = {chosen.score} is none of rewards.endpoints ({', '.join(weights)}). "
            "Use one of them, environment, or reward for the whole."
        )
    # An endpoint with weight 0 scores every sample, also with shards.
    if settings.rewards.combine == "shard" and weights.get(chosen.score) != 0:
        yield (
            f"filter.score = {chosen.score}, but with rewards.combine = shard a sample has one endpoint's part "
            "only. Set filter.score to reward."
        )
