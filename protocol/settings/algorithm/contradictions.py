"""Settings of an algorithm that contradict each other: each is refused with the reason and what to change."""

from protocol.settings.algorithm.kl import KlSettings
from protocol.settings.algorithm.loss import LossSettings
from protocol.settings.algorithm.names import ADVANTAGES_OF_GROUPS, ADVANTAGES_OF_TOKENS
from protocol.settings.learner import LearnerSettings
from protocol.settings.rewards import RewardsSettings
from protocol.settings.rollout import RolloutSettings

# The controller takes a KL for no further off its target than this share: learner/algorithms/kl.py.
_LARGEST_KL_ERROR = 0.2


def check_groups(learner: LearnerSettings, rollout: RolloutSettings) -> None:
    """Raise ValueError for an advantage that the groups' size, or what becomes of equal ones, takes the sense from."""
    advantage, size = learner.advantage, rollout.group_size
    if size < ADVANTAGES_OF_GROUPS.get(advantage or "", 1):
        raise ValueError(
            f"rollout.group_size = {size} gives a group nothing to be compared with. "
            f"Use at least 2 samples of a prompt, or learner.recipe = ppo or reinforce_pp, which takes single ones."
        )
    if learner.equal_groups == "skip" and (size == 1 or advantage in ADVANTAGES_OF_TOKENS):
        whose = "every group of one" if size == 1 else f"groups that learner.advantage = {advantage} learns from"
        raise ValueError(
            f"learner.equal_groups = skip would leave out {whose}: their rewards are equal. Set it to keep."
        )


def check_equal_groups(learner: LearnerSettings, rewards: RewardsSettings, kl: KlSettings) -> None:
    """Raise ValueError where groups of equal rewards have a gradient, and equal_groups would leave it out."""
    if learner.equal_groups != "skip":
        return
    parts = (
        (rewards.overlong_buffer_tokens, f"rewards.overlong_buffer_tokens = {rewards.overlong_buffer_tokens}"),
        (rewards.truncated == "penalise", "rewards.truncated = penalise"),
        (kl.coefficient, f"kl.coefficient = {kl.coefficient}"),
    )
    for is_given, setting in parts:
        if is_given:
            raise ValueError(
                f"learner.equal_groups = skip would leave out groups from which {setting} has something to learn "
                "though their services' rewards are equal. Set it to keep."
            )


def check_credit(learner: LearnerSettings, rewards: RewardsSettings) -> None:
    """Raise ValueError where rewards of single turns would be lost in one advantage, or in another scale."""
    if rewards.credit != "turn":
        return
    if learner.advantage in ADVANTAGES_OF_GROUPS:
        raise ValueError(
            f"rewards.credit = turn gives the tokens of an answer different rewards, and learner.advantage = "
            f"{learner.advantage} gives them one advantage. Use learner.recipe = ppo or reinforce_pp, or set "
            "rewards.credit to conversation."
        )
    if rewards.normalize:
        raise ValueError(
            "rewards.normalize = true puts the reward of a whole conversation into another scale, and rewards.credit = "
            "turn leaves those of its turns as they are. Leave one of the two out."
        )
    if rewards.clip is not None:
        raise ValueError(
            f"rewards.clip = {rewards.clip:g} cuts the reward of a whole conversation, and rewards.credit = turn "
            "leaves those of its turns as they are: the last turn would pay for what was cut. Leave one of the two out."
        )


def check_loss(learner: LearnerSettings, loss: LossSettings, kl: KlSettings) -> None:
    """Raise ValueError for parts of a loss of which one undoes or ignores the other."""
    if learner.loss == "gspo" and learner.advantage in ADVANTAGES_OF_TOKENS:
        raise ValueError(
            f"learner.loss = gspo clips whole answers, and learner.advantage = {learner.advantage} gives each token "
            "its own. Use learner.loss = ppo, or an advantage of groups such as grpo."
        )
    if loss.constant is not None and loss.aggregate != "seq_sum_norm":
        raise ValueError(
            f"loss.constant = {loss.constant} divides nothing: loss.aggregate is {loss.aggregate}. "
            "Set loss.aggregate to seq_sum_norm, or loss.constant to null."
        )
    if kl.target is not None and not kl.coefficient:
        raise ValueError(
            f"kl.target = {kl.target} has nothing to move: kl.coefficient is 0, and stays so. "
            "Set kl.coefficient to where it begins, such as 0.001, or kl.target to null."
        )
    if kl.coefficient and kl.place == "loss" and kl.form == "k1":
        raise ValueError(
            "kl.form = k1 in the loss holds the policy near nothing: its gradient is that of the samples' own "
            "logprobs, whose mean is 0. Set kl.form to k3 or k2, or kl.place to reward."
        )
    low, high = learner.correction_low, learner.correction_high
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"learner.correction_low = {low} is not below learner.correction_high = {high}: no weight is between them."
        )
    if learner.lr_warmup_steps and learner.lr_warmup_ratio:
        raise ValueError(
            f"learner.lr_warmup_steps = {learner.lr_warmup_steps} and learner.lr_warmup_ratio = "
            f"{learner.lr_warmup_ratio} both say how long the warm-up is. Set one of them to 0."
        )


def check_kl_controller(learner: LearnerSettings, rollout: RolloutSettings, kl: KlSettings) -> None:
    """Raise ValueError for a controller that one step's trajectories could take below 0: it would reward the KL."""
    num_samples = learner.groups_per_step * rollout.group_size
    if kl.target is not None and kl.horizon <= _LARGEST_KL_ERROR * num_samples:
        raise ValueError(
            f"kl.horizon = {kl.horizon:g} lets one step of {num_samples} samples take kl.coefficient to 0 or below. "
            f"Set it above {_LARGEST_KL_ERROR * num_samples:g}; 10000 is usual."
        )


def check_shaping(rewards: RewardsSettings, rollout: RolloutSettings) -> None:
    """Raise ValueError for shaping that would change every reward, or none."""
    most = rewards.overlong_max_tokens or rollout.max_response_tokens
    if rewards.overlong_buffer_tokens >= most:
        raise ValueError(
            f"rewards.overlong_buffer_tokens = {rewards.overlong_buffer_tokens} is not below the {most} tokens of "
            f"{'rewards.overlong_max_tokens' if rewards.overlong_max_tokens else 'rollout.max_response_tokens'}: "
            "every answer would be penalised. Lower it."
        )
    if rewards.overlong_max_tokens is not None and not rewards.overlong_buffer_tokens:
        raise ValueError(
            f"rewards.overlong_max_tokens = {rewards.overlong_max_tokens} penalises nothing: "
            "rewards.overlong_buffer_tokens is 0. Set both or neither."
        )
