"""Parts of a conversation that goes on: which are taken, and what is said of the others."""

from typing import Any

import pytest

from protocol.errors import FrameError
from protocol.wire.conversation import ConversationPart, FinishedTurn, check_part, split_buffers
from protocol.wire.trajectory import VersionSpan
from tests.protocol.wire.examples import example_part, part_buffers

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
