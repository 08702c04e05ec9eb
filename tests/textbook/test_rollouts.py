"""Answers to a user's prompts: from the plain loop's weights of the moment, scored by them, with drawn rewards."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.data.prompts import Prompt
from protocol.errors import OperatorError
from tests.fakes.tiny_models import make_tiny_model
from tests.textbook.loop import Textbook
from tests.textbook.rollouts import Rollouts
from tests.textbook.settings import comparison_settings

_END = 1  # of the tiny models' texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=True, hidden_size=32, num_layers=1, max_positions=64)


def rollouts_of(model: Path, prompts: list[str | list[dict[str, Any]]], *options: str) -> tuple[Textbook, Rollouts]:
    settings = comparison_settings(str(model), "p.jsonl", ["--rollout.max_response_tokens", "24", *options])
    loop = Textbook(settings, model)
    return loop, Rollouts(settings, model, [Prompt(str(n), p, None, {}) for n, p in enumerate(prompts)], loop)


def test_prompts_are_answered_in_their_order_and_over_again_without_those_too_long(model: Path) -> None:
    _, rollouts = rollouts_of(model, ["ab", "x" * 41, "c"])
    groups = list(islice(rollouts.groups(), 3))
    assert [int((~group[0].mask).sum()) for group in groups] == [2, 1, 2]
    assert [len(group) for group in groups] == [4, 4, 4]


def test_answers_are_drawn_by_the_loops_weights_of_the_moment_and_carry_its_logprobs(model: Path) -> None:
    loop, rollouts = rollouts_of(model, ["ab"])
    with torch.no_grad():
        for weight in loop.policy.parameters():
            weight.mul_(1.5)
    rollouts.take_weights()
    (group,) = islice(rollouts.groups(), 1)
    assert rollouts.logprob_difference < 1e-4
    for answer in group:
        assert answer.behaviour is not None
        assert (answer.behaviour[~answer.mask] == 0.0).all()
        assert torch.equal(torch.tensor(answer.behaviour[answer.mask]), loop.logprobs(loop.policy, answer).detach())


def test_answer_ends_with_the_first_end_of_text_or_at_its_length(model: Path) -> None:
    _, rollouts = rollouts_of(model, ["ab"], "--rollout.group_size", "64")
    (group,) = islice(rollouts.groups(), 1)
    written = [answer.tokens[answer.mask] for answer in group]
    assert all(_END not in each[:-1] for each in written)
    assert all(len(each) == 24 or each[-1] == _END for each in written)


def test_rewards_depend_on_the_answer_and_are_right_or_wrong_for_dapo(model: Path) -> None:
    _, rollouts = rollouts_of(model, ["ab"])
    _, of_dapo = rollouts_of(model, ["ab"], "--learner.recipe", "dapo")
    (group,), (binary,) = islice(rollouts.groups(), 1), islice(of_dapo.groups(), 1)
    assert len({answer.reward for answer in group}) == 4
    assert {answer.reward for answer in binary} <= {0.0, 1.0}
    again = [rollouts._reward(answer.tokens) for answer in group]
    assert again == [answer.reward for answer in group]
    assert not np.allclose(again, [rollouts._reward(answer.tokens[:-1]) for answer in group])


def test_chat_messages_without_a_template_are_refused(model: Path) -> None:
    with pytest.raises(OperatorError, match=r"^data\.train = .*p\.jsonl has chat messages, and the model has no chat"):
        rollouts_of(model, [[{"role": "user", "content": "?"}]])


def test_prompts_that_are_all_too_long_are_refused(model: Path) -> None:
    with pytest.raises(OperatorError, match=r"^data\.train = .*p\.jsonl has no prompt of 1 to 40 tokens\."):
        rollouts_of(model, ["x" * 41])
