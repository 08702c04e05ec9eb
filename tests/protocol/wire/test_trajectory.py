"""A trajectory's arrays and facts must agree: every contradiction is named."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.errors import FrameError
from protocol.wire.conversation import ConversationPart, FinishedTurn, check_part, split_buffers
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, TurnReward, VersionSpan, check_vocabulary
from tests.protocol.wire.examples import example_facts, example_part, example_trajectory, part_buffers


def refusal(trajectory: Trajectory) -> tuple[str, str]:
    with pytest.raises(FrameError) as caught:
        Trajectory.from_buffers(trajectory.facts, trajectory.to_buffers())
    return str(caught.value), caught.value.reason


def with_arrays(**arrays: list[float]) -> Trajectory:
    kinds: dict[str, Any] = {"tokens": np.int32, "behaviour_logprobs": np.float32, "loss_mask": np.uint8}
    changed: dict[str, Any] = {name: np.array(values, kinds[name]) for name, values in arrays.items()}
    return replace(example_trajectory(), **changed)


def test_from_buffers_returns_what_to_buffers_wrote() -> None:
    sent = example_trajectory()
    got = Trajectory.from_buffers(sent.facts, sent.to_buffers())
    assert got.facts == sent.facts
    assert got.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert got.behaviour_logprobs.tolist() == [0.0, 0.0, -0.5, -1.5, 0.0, -0.25]
    assert got.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]


def test_to_buffers_is_little_endian() -> None:
    tokens, logprobs, mask = example_trajectory().to_buffers()
    assert tokens[:4] == b"\x0a\x00\x00\x00"
    assert logprobs[8:12] == b"\x00\x00\x00\xbf"
    assert mask == b"\x00\x00\x01\x01\x00\x01"


def test_to_buffers_converts_wider_arrays() -> None:
    wide = example_trajectory()
    wide = replace(wide, tokens=wide.tokens.astype(np.int64), behaviour_logprobs=wide.behaviour_logprobs.astype(float))
    assert wide.to_buffers() == example_trajectory().to_buffers()


def test_versions_are_those_of_the_spans() -> None:
    facts = example_facts()
    assert (facts.oldest_version, facts.newest_version) == (3, 4)


def test_from_buffers_refuses_two_buffers() -> None:
    trajectory = example_trajectory()
    with pytest.raises(FrameError, match=r"^\$\.trajectory: has 2 buffers, expected tokens, logprobs and mask$"):
        Trajectory.from_buffers(trajectory.facts, trajectory.to_buffers()[:2])


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (0, "$.trajectory.tokens: has 23 bytes, expected 24 for 6 tokens"),
        (1, "$.trajectory.behaviour_logprobs: has 23 bytes, expected 24 for 6 tokens"),
        (2, "$.trajectory.loss_mask: has 5 bytes, expected 6 for 6 tokens"),
    ],
)
def test_from_buffers_refuses_a_short_buffer(place: int, text: str) -> None:
    trajectory = example_trajectory()
    buffers = trajectory.to_buffers()
    buffers[place] = buffers[place][:-1]
    with pytest.raises(FrameError) as caught:
        Trajectory.from_buffers(trajectory.facts, buffers)
    assert (str(caught.value), caught.value.reason) == (text, "length")


def test_from_buffers_refuses_an_empty_trajectory() -> None:
    with pytest.raises(FrameError, match=r"^\$\.trajectory\.num_prompt_tokens: is 2 of 0 tokens$"):
        Trajectory.from_buffers(example_facts(num_tokens=0), [b"", b"", b""])


@pytest.mark.parametrize("num_prompt_tokens", [0, 6, 7])
def test_check_refuses_a_prompt_that_is_nothing_or_all(num_prompt_tokens: int) -> None:
    text, reason = refusal(example_trajectory(num_prompt_tokens=num_prompt_tokens))
    assert (text, reason) == (f"$.trajectory.num_prompt_tokens: is {num_prompt_tokens} of 6 tokens", "invalid")


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"tokens": [10, 11, -1, 13, 14, 15]}, "tokens: holds the token -1, expected 0 or more"),
        ({"loss_mask": [0, 0, 2, 1, 0, 1]}, "loss_mask: holds 2, expected 0 or 1"),
        ({"loss_mask": [0, 1, 1, 1, 0, 1]}, "loss_mask: is 1 inside the prompt"),
        ({"behaviour_logprobs": [0, 0, -0.5, 0.5, 0, 0]}, "behaviour_logprobs: holds 0.5, above 0"),
        (
            {"behaviour_logprobs": [0, 0, -0.5, -1.5, -0.5, -0.25]},
            "behaviour_logprobs: is not 0 for a token that the model did not write",
        ),
        *(
            ({"behaviour_logprobs": [0, 0, -0.5, value, 0, 0]}, "behaviour_logprobs: holds a value that is not finite")
            for value in (math.nan, math.inf, -math.inf)
        ),
    ],
)
def test_check_refuses_arrays_that_cannot_be_trained(arrays: dict[str, list[float]], text: str) -> None:
    assert refusal(with_arrays(**arrays))[0] == f"$.trajectory.{text}"
    assert (refusal(with_arrays(**arrays))[1] == "nonfinite") == ("finite" in text)


@pytest.mark.parametrize(
    ("facts", "text", "reason"),
    [
        ({"reward": 1.1e18}, "reward is 1.1e+18, expected at most 1e+18 either way", "invalid"),
        ({"reward": -1.1e18}, "reward is -1.1e+18, expected at most 1e+18 either way", "invalid"),
        ({"reward": math.nan}, "reward is nan", "nonfinite"),
        ({"reward": math.inf}, "reward is inf", "nonfinite"),
        ({"reward_parts": {"em": math.nan}}, "em is nan", "nonfinite"),
        ({"reward_score": math.nan}, "reward_score is nan", "nonfinite"),
    ],
)
def test_check_refuses_a_reward_that_cannot_be_trained(facts: dict[str, Any], text: str, reason: str) -> None:
    assert refusal(example_trajectory(**facts)) == (f"$.trajectory.reward: {text}", reason)


def test_rewards_of_turns_travel_with_the_facts() -> None:
    facts = example_trajectory(turn_rewards=[TurnReward(4, 0.25)]).facts
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=TrajectoryFacts) == facts
    assert b"turn_rewards" not in msgspec.msgpack.encode(example_trajectory().facts)


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ([TurnReward(5, 1.0)], "turn_rewards[0]: ends at 5 after 0, where the model wrote no token"),
        ([TurnReward(7, 1.0)], "turn_rewards[0]: ends at 7 after 0, where the model wrote no token"),
        (
            [TurnReward(4, 1.0), TurnReward(4, 1.0)],
            "turn_rewards[1]: ends at 4 after 4, where the model wrote no token",
        ),
        ([TurnReward(4, math.nan)], "turn_rewards[0]: is nan"),
        ([TurnReward(4, -2e18)], "turn_rewards[0]: is -2e+18"),
    ],
)
def test_check_refuses_a_turns_reward_that_stands_nowhere_or_is_no_number(
    turns: list[TurnReward], problem: str
) -> None:
    assert refusal(example_trajectory(turn_rewards=turns))[0] == f"$.trajectory.{problem}"


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([VersionSpan(2, 4, 3), VersionSpan(4, 4, 3)], "[1]: is [4, 4) after 4, of 6 tokens"),
        ([VersionSpan(2, 4, 3), VersionSpan(5, 7, 3)], "[1]: is [5, 7) after 4, of 6 tokens"),
        ([VersionSpan(2, 4, 3), VersionSpan(3, 6, 3)], "[1]: is [3, 6) after 4, of 6 tokens"),
        # A count of covers in uint8 would come back to 1 here.
        ([VersionSpan(2, 4, 3)] * 257 + [VersionSpan(5, 6, 4)], "[1]: is [2, 4) after 4, of 6 tokens"),
        ([VersionSpan(2, 4, 3)], ": do not cover exactly the tokens the model wrote"),
        ([VersionSpan(2, 6, 3)], ": do not cover exactly the tokens the model wrote"),
    ],
)
def test_check_refuses_spans_that_are_not_exactly_the_policys_tokens(spans: list[VersionSpan], text: str) -> None:
    assert refusal(example_trajectory(version_spans=spans))[0] == f"$.trajectory.version_spans{text}"


# -- parts of a running conversation -----------------------------------------------------------------------------------

SECOND = {"first_token": 4, "num_tokens": 2, "version_spans": [VersionSpan(5, 6, 4)]}


def test_part_of_whole_turns_is_taken() -> None:
    check_part(example_part(), part_buffers(), "$.parts")


def test_part_behind_others_counts_from_the_conversations_beginning() -> None:
    part = example_part(**SECOND, turns=[FinishedTurn(5, 6, "length", None)])
    check_part(part, part_buffers(4, 6), "$.parts")
    assert part.end == 6


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version_spans": []}, "$.parts.version_spans: do not cover exactly the tokens the model wrote"),
        ({"version_spans": [VersionSpan(2, 9, 3)]}, "$.parts.version_spans[0]: is [2, 9) after 0, of 5 tokens"),
        ({"turns": [FinishedTurn(1, 4, "stop", None)]}, "$.parts.turns[0]: is [1, 4) after 2, of 5 tokens"),
        ({"turns": [FinishedTurn(4, 3, "stop", None)]}, "$.parts.turns[0]: is [4, 3) after 2, of 5 tokens"),
        ({"turns": [FinishedTurn(2, 6, "stop", None)]}, "$.parts.turns[0]: is [2, 6) after 2, of 5 tokens"),
    ],
)
def test_part_that_contradicts_itself_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(FrameError) as refused:
        check_part(example_part(**changes), part_buffers(), "$.parts")
    assert str(refused.value) == problem


def test_turn_before_the_parts_first_token_is_refused() -> None:
    part = example_part(**SECOND, turns=[FinishedTurn(2, 4, "stop", None)])
    with pytest.raises(FrameError, match="after 4, of 6 tokens"):
        check_part(part, part_buffers(4, 6), "$.parts")


def test_arrays_of_several_parts_are_parted_again() -> None:
    parts = [example_part(), example_part(sample_index=2, **SECOND)]
    joined = [first + second for first, second in zip(part_buffers(), part_buffers(4, 6), strict=True)]
    assert split_buffers(parts, joined, "$.parts") == [part_buffers(), part_buffers(4, 6)]


def test_frames_of_another_length_are_refused() -> None:
    parts: list[ConversationPart] = [example_part()]
    with pytest.raises(FrameError) as refused:
        split_buffers(parts, part_buffers(0, 4), "$.parts")
    assert str(refused.value) == "$.parts: has buffers of 16, 16, 4 bytes for 5 tokens"


def test_model_tokens_are_those_of_every_version_span() -> None:
    spans = [VersionSpan(2, 5, 3), VersionSpan(5, 6, 4), VersionSpan(9, 12, 4)]
    assert example_facts(version_spans=spans).num_model_tokens == 7


def test_token_outside_the_vocabulary_is_refused() -> None:
    tokens = example_trajectory().tokens  # 15 is the highest
    check_vocabulary(tokens, None)
    check_vocabulary(tokens, 16)
    with pytest.raises(FrameError, match="holds the token 15, the policy's vocabulary has 15"):
        check_vocabulary(tokens, 15)
