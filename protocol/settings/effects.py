"""Settings that were changed and have no effect are refused; those with another effect than expected are reported."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from protocol.settings.learner import ADVANTAGES_OF_GROUPS, ADVANTAGES_OF_TOKENS, KINDS, LOSSES, bundle_of
from protocol.settings.paths import environment_file
from protocol.settings.rollout import BUNDLED_ENVIRONMENTS

if TYPE_CHECKING:
    from protocol.settings.settings import Settings


_LARGEST_CLIP_OF_ANSWERS = 0.05
_LARGEST_LR = 0.1
_LIMITS_OF_CONVERSATIONS = ("rollout.max_turns", "rollout.max_observation_tokens", "rollout.max_conversation_s")
_NONE_IN_ONE_TURN = "has no effect: rollout.environment = single_turn has one turn, without tools."
_NONE_FOR_AGENTS = (
    "does not apply to agents: the program writes its prompts and the replies of its tools, and ends the conversation. "
    "agents.max_requests limits its turns. Limit the others in the program, or remove it."
)


class _Use(NamedTuple):
    """A condition without which settings have no effect."""

    is_met: Callable[["Settings"], bool]
    names: tuple[str, ...]  # settings; a section's name stands for all of them
    reason: str  # why they have none otherwise, and what to change


def _may_have_critic(settings: "Settings") -> bool:
    """Return whether the advantage has a critic. True for a user's own, which is not loaded here."""
    advantage = settings.learner.advantage or ""
    return advantage not in ADVANTAGES_OF_GROUPS and ADVANTAGES_OF_TOKENS.get(advantage, True)


def _scale_matters(settings: "Settings") -> bool:
    """Return whether a scale or shift of all rewards changes the advantages."""
    rewards, kl = settings.rewards, settings.kl
    has_other_term = rewards.clip is not None or rewards.overlong_buffer_tokens or rewards.truncated == "penalise"
    is_kl_in_reward = kl.coefficient and kl.place == "reward"
    return settings.learner.advantage != "grpo" or bool(has_other_term or is_kl_in_reward)


def _is_own_class(settings: "Settings") -> bool:
    """Return whether the environment is a user's class, which may use any tool."""
    name = settings.rollout.environment
    return name not in BUNDLED_ENVIRONMENTS and environment_file(name) is None


def _plays_agents(settings: "Settings") -> bool:
    return settings.rollout.environment.partition(":")[0] in ("agents", "agent")


def _may_search(settings: "Settings") -> bool:
    name, is_tool = settings.rollout.environment, "search" in settings.tools.names
    is_reported = name == "single_turn"  # by `describe_surprises`
    return name == "search" or (name == "tools" and is_tool) or _is_own_class(settings) or is_reported


# Settings of prompts, generation, rewards and their losses. Sizes of answers may stay in a file that RL uses too.
_OF_GENERATION = (
    *(f"data.{name}" for name in ("prompt_key", "label_key", "label_required", "template", "system_prompt")),
    *("data.apply_chat_template", "data.max_prompt_tokens", "rewards", "sampling", "agents", "retriever", "filter"),
    *("rollout.environment", "rollout.chat_template_kwargs", "rollout.temperature", "kl.coefficient", "loss"),
    *(f"learner.{name}" for name in ("recipe", "advantage", "loss", "correction", "gamma", "gae_lambda", "whiten")),
    *(f"learner.{name}" for name in ("clip_low", "clip_high", "dual_clip", "correction_low", "correction_high")),
)
_USES = (
    _Use(
        lambda settings: not settings.is_of_rows,
        _OF_GENERATION,
        "the objective learns from whole rows and generates and scores nothing. Remove it.",
    ),
    _Use(
        lambda settings: settings.kl.coefficient > 0.0 or settings.objective in ("dpo", "kto", "distill"),
        ("reference",),
        "kl.coefficient is 0, and the reference is of the KL alone. Set kl.coefficient, such as 0.001, or remove it.",
    ),
    _Use(
        lambda settings: settings.kl.coefficient > 0.0,
        ("kl.place", "kl.form"),
        "kl.coefficient is 0. Set kl.coefficient, such as 0.001, or remove it.",
    ),
    _Use(
        lambda settings: settings.objective != "dpo" or settings.preference.has_reference,
        ("reference",),
        "preference.loss has no reference. Remove it, or use preference.loss = sigmoid.",
    ),
    _Use(
        lambda settings: settings.objective == "dpo",
        tuple(f"preference.{name}" for name in ("loss", "label_smoothing", "average", "gamma", "nll_coefficient")),
        "objective is not dpo. Set it, or remove this setting.",
    ),
    _Use(
        lambda settings: settings.objective in ("dpo", "kto"),
        ("preference.beta",),
        "objective is not dpo or kto. Set it, or remove this setting.",
    ),
    _Use(
        lambda settings: settings.objective == "reward_model",
        ("preference.center_coefficient",),
        "objective is not reward_model. Set it, or remove this setting.",
    ),
    _Use(
        lambda settings: settings.objective != "reward_model",
        ("policy.lora.rank", "learner.router_aux_loss"),
        "objective = reward_model trains all weights, by the loss of pairs alone. Remove it.",
    ),
    _Use(
        lambda settings: settings.objective == "distill",
        ("distill",),
        "objective is not distill. Set it, or remove this setting.",
    ),
    _Use(
        lambda settings: settings.objective != "distill",
        ("learner.router_aux_loss",),
        "objective = distill has the loss of the teacher's distributions alone. Remove it.",
    ),
    _Use(
        lambda settings: not settings.is_of_rows,
        ("reference.refresh_every_steps",),
        "objectives of rows keep their first reference. Remove it.",
    ),
    _Use(
        lambda settings: settings.objective == "kto",
        ("preference.desirable_weight", "preference.undesirable_weight"),
        "objective is not kto. Set it, or remove this setting.",
    ),
    _Use(
        lambda settings: settings.preference.loss in ("sigmoid", "robust"),
        ("preference.label_smoothing",),
        "preference.loss is not sigmoid or robust. Set it, or remove the smoothing.",
    ),
    _Use(
        lambda settings: settings.preference.has_reference,
        ("preference.average",),
        "preference.loss = simpo and orpo always have means. Remove it.",
    ),
    _Use(
        lambda settings: settings.preference.loss == "simpo",
        ("preference.gamma",),
        "preference.loss is not simpo. Set it, or remove gamma.",
    ),
    _Use(
        lambda settings: settings.kl.target is not None,
        ("kl.horizon",),
        "kl.target is null, so that kl.coefficient is fixed. Set kl.target, or remove it.",
    ),
    _Use(
        _may_have_critic,
        ("critic",),
        "learner.advantage has no critic. Set learner.recipe to ppo (or learner.advantage to gae), or remove it.",
    ),
    _Use(
        lambda settings: settings.rewards.truncated == "penalise",
        ("rewards.truncated_penalty",),
        "rewards.truncated is not penalise. Set it, or remove the penalty.",
    ),
    _Use(
        lambda settings: settings.rewards.overlong_buffer_tokens > 0,
        ("rewards.overlong_penalty", "rewards.overlong_max_tokens"),
        "rewards.overlong_buffer_tokens is 0. Set both or neither.",
    ),
    _Use(
        _scale_matters,
        ("rewards.normalize",),
        "learner.advantage = grpo divides by each group's own deviation. Remove it, or use another advantage.",
    ),
    _Use(
        lambda settings: settings.filter.dynamic_sampling,
        ("filter.low", "filter.high", "filter.max_replaced", "filter.at_limit"),
        "filter.dynamic_sampling is false. Set it to true, or remove the bounds.",
    ),
    _Use(
        lambda settings: settings.filter.dynamic_sampling or settings.data.curriculum.is_on,
        ("filter.score",),
        "nothing is filtered: filter.dynamic_sampling is false, and data.curriculum has no bounds. Remove it.",
    ),
    _Use(
        lambda settings: settings.data.curriculum.is_on,
        ("data.curriculum.every",),
        "data.curriculum.easy and hard are null. Set one of them, or remove it.",
    ),
    _Use(
        lambda settings: settings.learner.lr > 0.0,
        ("learner.lr_warmup_steps", "learner.lr_warmup_ratio", "learner.min_lr_ratio"),
        "learner.lr is 0. Set it, or remove the schedule.",
    ),
    _Use(
        lambda settings: settings.learner.lr_schedule != "constant",
        ("learner.min_lr_ratio",),
        "learner.lr_schedule = constant keeps the peak. Set it to linear or cosine, or remove the ratio.",
    ),
    _Use(
        lambda settings: settings.policy.lora.rank > 0,
        ("policy.lora.alpha", "policy.lora.targets"),
        "policy.lora.rank is 0, so that the whole model is trained. Set the rank, such as 16, or remove it.",
    ),
    _Use(
        lambda settings: settings.rollout.environment == "tools",
        ("tools.names",),
        "rollout.environment is not tools. Set it, or remove the names.",
    ),
    _Use(
        lambda settings: settings.rollout.environment.startswith("verl_tools:"),
        ("tools.reward",),
        "rollout.environment has no tools of verl. Set it to verl_tools:FILE.yaml, or remove the reward.",
    ),
    _Use(
        lambda settings: settings.rollout.environment == "tools" or _is_own_class(settings),
        ("tools.http", "tools.mcp"),
        "rollout.environment calls no such tool. Set it to tools, or remove them.",
    ),
    _Use(
        _may_search,
        ("retriever.url", "retriever.topk", "retriever.batch_size"),
        "rollout.environment does not search. Set it to search, add search to tools.names, or remove this setting.",
    ),
    _Use(
        lambda settings: settings.rollout.environment in ("search", "single_turn") or _is_own_class(settings),
        ("retriever.words",),
        "rollout.environment writes passages in plain words, if any. Set it to search, or remove this setting.",
    ),
    _Use(
        _plays_agents,
        ("agents",),
        "rollout.environment plays no agents. Set it, such as to agents, or remove this setting.",
    ),
    _Use(
        lambda settings: bool(settings.sampling.reshaping),
        ("sampling.only_eval",),
        "no setting of sampling changes the distribution. Set one, such as sampling.top_p, or remove it.",
    ),
)


def find_without_effect(settings: "Settings") -> Iterator[str]:
    """Yield a sentence for each changed setting that has no effect.

    Changed: neither the default nor what the recipe, the advantage or the loss brings.
    """
    bundle = bundle_of(settings.learner.model_dump(include={"recipe", *KINDS}))
    for use in _USES:
        if not use.is_met(settings):
            for name in use.names:
                for changed, value in _changed(settings, name, bundle):
                    yield f"{changed} = {_shown(value)} has no effect: {use.reason}"
    for kind, names in KINDS.items():
        chosen, readable = getattr(settings.learner, kind), set().union(*names.values())
        # An algorithm of the user's own may read every setting of its kind.
        for setting in sorted(readable - names.get(chosen, readable)):
            for changed, value in _changed(settings, f"learner.{setting}", bundle):
                readers = ", ".join(name for name, reads in names.items() if setting in reads)
                yield (
                    f"{changed} = {value} has no effect: learner.{kind} = {chosen} does not read it. Remove "
                    f"it, or set learner.{kind} to one of {readers}."
                )


def describe_surprises(settings: "Settings") -> list[str]:
    """Return a sentence for each setting that does something else than its name may promise."""
    learner, surprises = settings.learner, []
    reads = LOSSES.get(learner.loss or "", set())
    bundle = bundle_of(learner.model_dump(include={"recipe", *KINDS}))
    is_one_update = learner.num_mini_batches * learner.num_epochs == 1
    if settings.policy.old_logprobs == "recompute" and is_one_update:
        for name in sorted(reads):
            surprises += [
                f"{changed} = {value} clips nothing: with policy.old_logprobs = recompute and one update a step "
                "(learner.num_mini_batches, learner.num_epochs) the ratio is 1."
                for changed, value in _changed(settings, f"learner.{name}", bundle)
            ]
    if learner.loss == "gspo" and learner.clip_high > _LARGEST_CLIP_OF_ANSWERS:
        surprises.append(
            f"learner.clip_high = {learner.clip_high:g} clips almost nothing: the ratio of gspo is an answer's mean. "
            "The paper has 0.0004."
        )
    warmup, last = settings.critic.warmup_steps, settings.run.max_steps
    if last and warmup >= last and ADVANTAGES_OF_TOKENS.get(learner.advantage or "", False):
        surprises.append(
            f"critic.warmup_steps = {warmup} and run.max_steps = {last}: the critic alone is trained, and the policy "
            "stays as it is. To train the policy too, set run.max_steps above critic.warmup_steps."
        )
    num_steps = last - (warmup if ADVANTAGES_OF_TOKENS.get(learner.advantage or "", False) else 0)
    if 0 < num_steps < learner.lr_warmup_steps:
        surprises.append(
            f"learner.lr_warmup_steps = {learner.lr_warmup_steps} is longer than the policy's {num_steps} steps: its "
            f"learning rate ends at {num_steps / learner.lr_warmup_steps:.2g} of learner.lr."
        )
    surprises += _surprises_of_data(settings)
    surprises += _surprises_of_turns(settings, bundle)
    if learner.lr >= _LARGEST_LR:
        surprises.append(f"learner.lr = {learner.lr:g} ruins a model within a few steps. Usual are 1e-6 to 1e-4.")
    if (quantization := settings.rollout.engine_args.get("quantization")) is not None:
        surprises.append(
            f"rollout.engine_args.quantization = {quantization}: servers sample from rounded weights, which the "
            "learner does not have. Watch policy/kl_fresh and policy/effective_sample_share."
        )
    return surprises


def _surprises_of_turns(settings: "Settings", bundle: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield limits of conversations that do not apply to the environment; a file for several may have them."""
    names: tuple[str, ...] = ()
    reason = _NONE_IN_ONE_TURN
    if settings.rollout.environment == "single_turn" and not settings.is_of_rows:
        names = (*_LIMITS_OF_CONVERSATIONS, "retriever", "tools")
    elif _plays_agents(settings):
        names, reason = (*_LIMITS_OF_CONVERSATIONS, "rollout.truncate_left"), _NONE_FOR_AGENTS
    for name in names:
        for changed, value in _changed(settings, name, bundle):
            yield f"{changed} = {_shown(value)} {reason}"


def _surprises_of_data(settings: "Settings") -> Iterator[str]:
    for name, given in (("data.eval", settings.data.eval), ("eval.sets", settings.eval.sets)):
        if given and not settings.eval.every_steps:
            yield f"{name} is never evaluated: eval.every_steps is 0. Set it, such as to 20, or remove {name}."
    if settings.is_of_rows and (num := settings.learner.num_epochs) > 1:
        yield (
            f"learner.num_epochs = {num} trains each step's rows {num} times before the next step's. Passes over "
            "data.train are run.max_epochs."
        )


def _changed(settings: "Settings", name: str, bundle: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of a setting, or of each setting of a section, that was changed."""
    section, _, path = name.partition(".")
    model: BaseModel = getattr(settings, section)
    if not path:
        for field in type(model).model_fields:
            yield from _changed(settings, f"{section}.{field}", bundle)
        return
    *inside, field = path.split(".")
    for part in inside:
        model = getattr(model, part)
    value, default = getattr(model, field), type(model).model_fields[field].default
    if value not in (default, bundle.get(section, {}).get(path, default)):
        yield name, value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
