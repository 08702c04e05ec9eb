"""Settings of the learner: ranks, steps, staleness, optimizer, checkpoints, and the algorithm with its loss and KL.

First the names of algorithms, the settings that each name reads, and the recipes. `learner.algorithms.by_name` maps
these names to functions; a test compares the two. This file needs no torch.
"""

import re
from collections.abc import Callable, Collection, Mapping, Set
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from protocol.settings.paths import CodeName
from protocol.settings.section import (
    AnyValues,
    Count,
    CountAboveZero,
    Fraction,
    Seconds,
    Section,
    StoreUrl,
    ZeroStage,
)

# Advantage: fewest samples of a prompt. These give each token of an answer the same advantage.
ADVANTAGES_OF_GROUPS = {"grpo": 2, "dr_grpo": 2, "rloo": 2, "reinforce_pp_baseline": 2, "opo": 2}
# These give each token its own advantage, from its own trajectory alone. Value: true if a critic is needed.
ADVANTAGES_OF_TOKENS = {"gae": True, "reinforce_pp": False}

# Name: settings of `learner` that only some names of its kind read.
ADVANTAGES: dict[str, Set[str]] = {name: set() for name in ADVANTAGES_OF_GROUPS} | {
    "gae": {"gamma", "gae_lambda"},
    "reinforce_pp": {"gamma"},
}
LOSSES: dict[str, Set[str]] = {
    "ppo": {"clip_low", "clip_high", "dual_clip"},
    "gspo": {"clip_low", "clip_high"},
    "cispo": {"clip_high"},
    "reinforce": set(),
}
CORRECTIONS: dict[str, Set[str]] = {
    "none": set(),
    "tis": {"correction_high"},
    "icepop": {"correction_low", "correction_high"},
    "geo_mask": {"correction_low", "correction_high"},
}
KINDS = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS}

MIN_SHARED_TOKENS = 64  # shorter prompts are computed for each trajectory: sharing them saves nothing

_Aggregate = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_norm"]
AGGREGATES = get_args(_Aggregate)
_Recipe = Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"]

_USER_CODE = re.compile(r"[^:]+\.py:[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in names and not _USER_CODE.fullmatch(name):
            raise ValueError(f"expected one of {', '.join(names)}, or FILE.py:name, or module:name")
        return name

    return check


_AdvantageName = Annotated[CodeName, AfterValidator(_one_of(ADVANTAGES))]
_LossName = Annotated[CodeName, AfterValidator(_one_of(LOSSES))]
_CorrectionName = Annotated[CodeName, AfterValidator(_one_of(CORRECTIONS))]


class AlgorithmSettings(Section):
    """The part of `learner` that says how a batch becomes a loss."""

    recipe: _Recipe = Field(
        "grpo",
        description="Bundle of settings that belong together (docs/do/algorithms.md); given settings override it.",
    )
    advantage: _AdvantageName | None = Field(
        None,
        description="grpo, dr_grpo, rloo, reinforce_pp_baseline, opo, gae, reinforce_pp, or FILE.py:name; "
        "null: the recipe's.",
    )
    loss: _LossName | None = Field(
        None, description="ppo, gspo, cispo, reinforce, or FILE.py:name; null: the recipe's."
    )
    correction: _CorrectionName | None = Field(
        None, description="none, tis, icepop, geo_mask, or FILE.py:name; null: the recipe's."
    )
    gamma: Fraction = Field(1.0, description="gae, reinforce_pp: discount of a reward per model token before it.")
    gae_lambda: Fraction = Field(1.0, description="gae: 1 uses observed rewards only, 0 the critic's next value only.")
    whiten: bool | None = Field(
        None, description="Bring the step's advantages to mean 0 and deviation 1; null: as the advantage's paper does."
    )
    clip_low: PositiveFloat = Field(0.2, description="ppo, gspo: the ratio is clipped below 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.2, description="ppo, gspo, cispo: the ratio is clipped above 1 + clip_high.")
    dual_clip: Annotated[float, Field(ge=1.0)] | None = Field(
        3.0, description="ppo: largest loss of a token with a negative advantage, in advantages; null: no limit."
    )
    correction_low: PositiveFloat | None = Field(
        None, description="Tokens (icepop) or answers (geo_mask) of a smaller weight are masked; null: 0.5 or 0.99."
    )
    correction_high: Annotated[float, Field(ge=1.0)] | None = Field(
        None,
        description="tis: importance weights are truncated to it; icepop, geo_mask: larger ones are masked; null: 2, "
        "or 1.01 for geo_mask.",
    )


class KlSettings(Section):
    coefficient: NonNegativeFloat = Field(0.0, description="Factor of the KL; 0: no reference is needed.")
    place: Literal["reward", "loss", "advantage"] = Field(
        "loss",
        description="reward: subtracted from each token's reward; loss: added to the loss, by loss.aggregate; "
        "advantage: subtracted from each token's own advantage, which is on-policy distillation from reference.model.",
    )
    form: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimate from one token, d = learner's minus reference's logprob: d, d^2/2 or exp(-d) - 1 + d.",
    )
    target: PositiveFloat | None = Field(
        None, description="KL per token, in nats, toward which the coefficient is adjusted; null: it is fixed."
    )
    horizon: PositiveFloat = Field(
        10_000.0, description="Trajectories over which a KL 20 % off its target changes the coefficient by 20 %."
    )


class LossSettings(Section):
    aggregate: _Aggregate = Field(
        "token_mean",
        description="token_mean: mean over model tokens; seq_mean_..: mean over trajectories of their tokens' mean or "
        "sum; seq_sum_norm: that sum over loss.constant.",
    )
    constant: CountAboveZero | None = Field(
        None, description="Divisor of seq_sum_norm; null: rollout.max_response_tokens."
    )


# Recipe -> section -> setting -> value. Other settings keep their own defaults.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv:2402.03300, with DAPO's mean over tokens and without its KL, which needs a reference model.
    "grpo": {"learner": {"advantage": "grpo", "loss": "ppo", "correction": "tis"}},
    # arXiv:2503.14476: clip-higher, mean over tokens, groups without signal replaced (filter.low and high fit scores
    # from 0 to 1). Its penalty of overlong answers depends on their budget: rewards.overlong_buffer_tokens.
    "dapo": {
        "learner": {
            "advantage": "grpo",
            "loss": "ppo",
            "correction": "tis",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 10.0,
        },
        "filter": {"dynamic_sampling": True},
    },
    # arXiv:2503.20783: no division by a group's deviation or an answer's length.
    "dr_grpo": {"learner": {"advantage": "dr_grpo", "loss": "ppo", "correction": "tis"}},
    # arXiv:2402.14740
    "rloo": {"learner": {"advantage": "rloo", "loss": "reinforce", "correction": "tis"}},
    # arXiv:2501.03262: returns minus the KL, whitened over the step.
    "reinforce_pp": {
        "learner": {"advantage": "reinforce_pp", "loss": "ppo", "correction": "tis"},
        "kl": {"coefficient": 0.001, "place": "reward", "form": "k1"},
    },
    # arXiv:1707.06347 with arXiv:1909.08593's KL in the reward; the section `critic` has the critic's settings.
    "ppo": {
        "learner": {"advantage": "gae", "loss": "ppo", "correction": "tis"},
        "kl": {"coefficient": 0.001, "place": "reward", "form": "k1"},
        "rewards": {"clip": 10.0},
    },
    # arXiv:2507.18071
    "gspo": {"learner": {"advantage": "grpo", "loss": "gspo", "correction": "tis"}},
    # arXiv:2506.13585
    "cispo": {"learner": {"advantage": "grpo", "loss": "cispo", "correction": "none"}},
}
assert set(RECIPES) == set(get_args(_Recipe))

# Name of an advantage or a loss -> section -> setting -> value of its paper, which comes with the name, in a recipe or
# alone.
_PAPERS: dict[str, dict[str, dict[str, Any]]] = {
    "dr_grpo": {"loss": {"aggregate": "seq_sum_norm"}},
    # One ratio per answer, so that its clip is a thousandth of PPO's. In bfloat16 engine and learner differ by more on
    # the same weights: the ratio must be of the learner's own logprobs.
    "gspo": {
        "learner": {"clip_low": 3e-4, "clip_high": 4e-4},
        "loss": {"aggregate": "seq_mean_token_mean"},
        "policy": {"old_logprobs": "recompute"},
    },
    # The loss is itself a truncated importance weight, here at 5: it needs no second one.
    "cispo": {"learner": {"correction": "none", "clip_high": 4.0}},
}

DEFAULT_RECIPE = "grpo"


def bundle_of(learner: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return section -> setting -> value that a recipe, an advantage and a loss bring together.

    learner: recipe and names, where they are given. An unknown recipe brings nothing: the validator refuses it.
    """
    recipe = RECIPES.get(str(learner.get("recipe", DEFAULT_RECIPE)), {})
    bundle = {section: dict(values) for section, values in recipe.items()}
    of_learner = bundle.get("learner", {})
    for kind in ("advantage", "loss"):
        name = learner.get(kind) or of_learner.get(kind)
        for section, values in _PAPERS.get(str(name), {}).items():
            bundle[section] = bundle.get(section, {}) | values
    return bundle


def over_recipe(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """Return the given sections with the bundle's settings below them, and the names that it added to each section."""
    learner = _as_given(given.get("learner", {}))
    laid, added = dict(given), {}
    for section, bundle in (bundle_of(learner) if isinstance(learner, Mapping) else {}).items():
        own = _as_given(laid.get(section, {}))
        if isinstance(own, Mapping):  # otherwise the section's validator refuses it
            # null is the recipe's name of an algorithm
            unset = {name for name in KINDS if section == "learner" and own.get(name) is None}
            kept = {name: value for name, value in own.items() if name not in unset}
            laid[section], added[section] = bundle | kept, bundle.keys() - kept
    return laid, added


def _as_given(section: Any) -> Any:
    return section.model_dump(exclude_unset=True) if isinstance(section, Section) else section


class LearnerSettings(AlgorithmSettings):
    num_ranks: CountAboveZero = Field(1, description="DeepSpeed ranks.")
    zero_stage: ZeroStage = Field(
        0, description="DeepSpeed ZeRO stage: ranks share optimizer state (1), gradients too (2), weights too (3)."
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="State in host memory: the optimizer's (ZeRO 1 to 3), weights too (ZeRO 3)."
    )
    groups_per_step: CountAboveZero = Field(32, description="Prompts whose groups make one optimizer step.")
    max_staleness: Count = Field(1, description="Optimizer steps a trained token may lag behind; 0 is synchronous.")
    stale_policy: Literal["wait", "drop"] = Field(
        "wait", description="Groups near max_staleness: wait paces leases, drop drops them."
    )
    equal_groups: Literal["keep", "skip"] = Field(
        "keep",
        description="skip: the loss excludes groups of equal rewards, also from its divisor.",
    )
    num_mini_batches: CountAboveZero = Field(1, description="Parts of a step's groups; each is one optimizer update.")
    num_epochs: CountAboveZero = Field(1, description="Passes over a step's samples, in the same order.")
    stream: bool = Field(
        True,
        description="A step begins with the groups that are ready; false: with all. All: with a critic, several "
        "updates, whitened advantages, normalised rewards, keep_batches or a shared device.",
    )
    share_prompts: bool = Field(
        True,
        description=f"Samples of one prompt in a micro-batch compute it once, if it has {MIN_SHARED_TOKENS} tokens; "
        "false: each does.",
    )
    lr: NonNegativeFloat = Field(1e-6, description="Peak learning rate; 0: the weights do not change.")
    lr_warmup_steps: Count = Field(0, description="Steps of linear warm-up.")
    lr_warmup_ratio: Fraction = Field(0.0, description="Linear warm-up as a share of run.max_steps.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Decay after the warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: NonNegativeFloat = Field(
        0.0,
        description="AdamW weight decay of all weights, also of norms, biases and experts that no token used.",
    )
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm.")
    micro_batch_tokens: CountAboveZero = Field(
        8192, description="Token budget of one forward and backward pass on one rank."
    )
    gradient_checkpointing: bool = Field(False, description="Trade compute for memory in the backward pass.")
    router_aux_loss: NonNegativeFloat = Field(
        0.0, description="Mixture of experts: weight of the model's own load-balancing loss; 0: off."
    )
    checkpoint_every_steps: Count = Field(50, description="Steps between checkpoints; 0: only the last one.")
    keep_checkpoints: CountAboveZero = Field(2, ge=2, description="Valid checkpoints kept on disk.")
    keep_batches: Count = Field(
        0, description="Newest steps whose batches are kept in the run folder, for sluice replay; 0: none."
    )
    copy_checkpoints_to: StoreUrl | None = Field(
        None,
        description="URL of a folder (s3://BUCKET/FOLDER, file:///FOLDER) to which checkpoints are copied in the "
        "background, and from which a start fetches the newest; null: none.",
    )
    num_threads: Count = Field(0, description="CPU threads of one rank; 0: its share of the node's cores.")
    batch_timeout_s: Seconds = Field(
        1800.0, description="Longest wait of a rank for its next batch, without the time of evaluations."
    )
    rank_timeout_s: Seconds = Field(
        600.0,
        description="Longest wait of one rank for another that shows no progress: to meet, in a collective, "
        "or while rank 0 writes a checkpoint.",
    )
    deepspeed: AnyValues = Field({}, description="Merged into DeepSpeed's own configuration.")

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload != "none" and self.zero_stage == 0:
            raise ValueError(
                f"learner.offload = {self.offload} needs optimizer state that ranks share. Set learner.zero_stage to "
                f"{3 if self.offload == 'all' else '1, 2 or 3'}."
            )
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError(
                f"learner.offload = all needs learner.zero_stage = 3, and it is {self.zero_stage}. Set it to 3, or "
                "learner.offload to optimizer."
            )
        return self
