"""Each contradiction among an algorithm's settings is one sentence that says why, and what to change."""

from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.settings.loader import load_settings
from protocol.settings.settings import Settings

CASES: list[tuple[list[str], str]] = [
    (
        ["--rewards.credit", "turn"],
        "rewards.credit = turn gives the tokens of an answer different rewards, and learner.advantage = grpo gives "
        "them one advantage. Use learner.recipe = ppo or reinforce_pp, or set rewards.credit to conversation.",
    ),
    (
        ["--rewards.credit", "turn", "--learner.recipe", "ppo", "--rewards.normalize", "true"],
        "rewards.normalize = true rescales the reward of a whole conversation, and rewards.credit = turn leaves the "
        "rewards of its turns as they are. Remove one of the two.",
    ),
    (
        ["--rewards.credit", "turn", "--learner.recipe", "ppo", "--rewards.clip", "1"],
        "rewards.clip = 1 clips the reward of a whole conversation, and rewards.credit = turn leaves the rewards of "
        "its turns as they are: the last turn would get the difference. Remove one of the two.",
    ),
    (
        ["--rollout.group_size", "1"],
        "rollout.group_size = 1 gives a group nothing to be compared with. Use at least 2 samples of a prompt, or "
        "learner.recipe = ppo or reinforce_pp, which takes single ones.",
    ),
    (
        ["--learner.recipe", "ppo", "--rollout.group_size", "1", "--learner.equal_groups", "skip"],
        "learner.equal_groups = skip would skip every group of one: their rewards are equal. Set it to keep.",
    ),
    (
        ["--learner.advantage", "gae", "--learner.equal_groups", "skip"],
        "learner.equal_groups = skip would skip groups that learner.advantage = gae learns from: their rewards "
        "are equal. Set it to keep.",
    ),
    (
        ["--learner.equal_groups", "skip", "--rewards.overlong_buffer_tokens", "10"],
        "learner.equal_groups = skip would skip groups from which rewards.overlong_buffer_tokens = 10 has "
        "something to learn though their services' rewards are equal. Set it to keep.",
    ),
    (
        ["--learner.equal_groups", "skip", "--rewards.truncated", "penalise"],
        "learner.equal_groups = skip would skip groups from which rewards.truncated = penalise has "
        "something to learn though their services' rewards are equal. Set it to keep.",
    ),
    (
        ["--learner.equal_groups", "skip", "--kl.coefficient", "0.01"],
        "learner.equal_groups = skip would skip groups from which kl.coefficient = 0.01 has "
        "something to learn though their services' rewards are equal. Set it to keep.",
    ),
    (
        ["--learner.recipe", "gspo", "--learner.advantage", "gae"],
        "learner.loss = gspo clips whole answers, and learner.advantage = gae gives each token its own. "
        "Use learner.loss = ppo, or an advantage of groups such as grpo.",
    ),
    (
        ["--loss.constant", "100"],
        "loss.constant = 100 divides nothing: loss.aggregate is token_mean. "
        "Set loss.aggregate to seq_sum_norm, or loss.constant to null.",
    ),
    (
        ["--kl.target", "0.1"],
        "kl.target = 0.1 has nothing to adjust: kl.coefficient is 0. "
        "Set kl.coefficient to its first value, such as 0.001, or kl.target to null.",
    ),
    (
        ["--kl.coefficient", "0.01", "--kl.target", "0.1", "--kl.horizon", "51"],
        "kl.horizon = 51 lets one step of 256 samples take kl.coefficient to 0 or below. Set it above 51.2; "
        "10000 is usual.",
    ),
    (
        ["--learner.recipe", "ppo", "--kl.place", "loss"],
        "kl.form = k1 in the loss has no effect: its gradient is that of the samples' own logprobs, whose mean is 0. "
        "Set kl.form to k3 or k2, or kl.place to reward.",
    ),
    (
        ["--learner.correction_low", "2.5", "--learner.correction_high", "2"],
        "learner.correction_low = 2.5 is not below learner.correction_high = 2.0: no weight is between them.",
    ),
    (
        ["--learner.lr_warmup_steps", "5", "--learner.lr_warmup_ratio", "0.1"],
        "learner.lr_warmup_steps = 5 and learner.lr_warmup_ratio = 0.1 both set the length of the warm-up. "
        "Set one of them to 0.",
    ),
    (
        ["--rewards.overlong_buffer_tokens", "500"],
        "rewards.overlong_buffer_tokens = 500 is not below the 500 tokens of rollout.max_response_tokens: "
        "every answer would be penalised. Lower it.",
    ),
    (
        ["--learner.equal_groups", "skip", "--learner.advantage", "reinforce_pp_baseline"],
        "learner.equal_groups = skip would skip groups from which the whitening of the step's advantages "
        "(learner.whiten) has something to learn though their services' rewards are equal. Set it to keep.",
    ),
    (
        ["--learner.equal_groups", "skip", "--learner.router_aux_loss", "0.01"],
        "learner.equal_groups = skip would skip groups from which learner.router_aux_loss = 0.01 has something to "
        "learn though their services' rewards are equal. Set it to keep.",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), CASES, ids=[" ".join(options) for options, _ in CASES])
def test_contradiction_is_one_sentence_with_the_reason(options: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, options)
    assert str(caught.value) == f"settings: {sentence}"


@pytest.mark.parametrize(
    "sections",
    [
        {"learner": {"recipe": "ppo"}, "rollout": {"group_size": 1}},
        {"learner": {"advantage": "reinforce_pp"}, "rollout": {"group_size": 1}},
        {"learner": {"advantage": "my.py:best"}, "rollout": {"group_size": 1}},
        {"learner": {"advantage": "package.module:best", "loss": "./a/b.py:loss"}},
        {"learner": {"recipe": "dr_grpo"}, "loss": {"constant": 100}},
        {"learner": {"recipe": "ppo"}, "kl": {"target": 0.1}},
        {"kl": {"coefficient": 0.01, "target": 0.1, "horizon": 52}},
        {"rewards": {"overlong_buffer_tokens": 500, "overlong_max_tokens": 501}},
    ],
)
def test_what_goes_together_is_taken(sections: dict[str, Any]) -> None:
    Settings.model_validate(sections)
