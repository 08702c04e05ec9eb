"""What a micro-batch holds of its samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.models.micro_batch import LearnerSample, make_micro_batch


def sample(
    tokens: list[int], mask: list[int], advantage: float = 0.0, weights: list[float] | None = None
) -> LearnerSample:
    return LearnerSample(
        np.array(tokens, np.int32),
        np.array(mask, np.bool_),
        np.array([-0.1 * t for t in tokens], np.float32),
        advantage,
        None if weights is None else np.array(weights, np.float32),
    )


def test_micro_batch_lays_samples_end_to_end_longest_first() -> None:
    batch = make_micro_batch([sample([7, 8], [0, 1], 2.0), sample([1, 2, 3, 4], [0, 1, 0, 1], -1.0)])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.lengths == (4, 2)
    assert batch.counts == (2, 1)


def test_micro_batch_predicts_each_written_token_from_the_one_before() -> None:
    batch = make_micro_batch([sample([7, 8], [0, 1], 2.0), sample([1, 2, 3, 4], [0, 1, 0, 1], -1.0)])
    assert batch.predict_at.tolist() == [0, 2, 4]
    assert batch.targets.tolist() == [2, 4, 8]
    torch.testing.assert_close(batch.behaviour_logprobs, torch.tensor([-0.2, -0.4, -0.8]))
    assert batch.advantages.tolist() == [-1.0, -1.0, 2.0]
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]


def test_micro_batch_keeps_the_weights_of_written_tokens() -> None:
    batch = make_micro_batch([sample([1, 2, 3], [0, 1, 1], weights=[0.0, 0.5, 1.0])])
    assert batch.weights.tolist() == [0.5, 1.0]


def test_micro_batch_of_no_samples_has_one_token_and_predicts_nothing() -> None:
    batch = make_micro_batch([])
    assert batch.tokens.shape == (1, 1)
    assert (batch.num_model_tokens, batch.numbers) == (0, (-1,))


def test_micro_batch_does_not_change_when_a_sample_changes_later() -> None:
    one = sample([1, 2, 3], [0, 1, 1])
    batch = make_micro_batch([one])
    one.tokens[:] = 9
    assert batch.tokens.tolist() == [[1, 2, 3]]


def group(prompt: int, *answers: int, first: int = 0) -> list[LearnerSample]:
    """Return samples of one prompt of tokens from `first` on, whose answers have the numbers of tokens."""
    prompts = list(range(first, first + prompt))
    return [
        replace(sample([*prompts, *[500 + place] * answer], [0] * prompt + [1] * answer), number=place)
        for place, answer in enumerate(answers)
    ]


def test_shared_prompt_is_in_the_first_segment_alone() -> None:
    batch = make_micro_batch([*group(64, 1, 3), sample([7, 8], [0, 1])], share_prompts=True)
    assert batch.lengths == (67, 2, 1)
    assert batch.prompts == ((0, 0), (0, 0), (0, 64))
    assert batch.numbers == (1, -1, 0)
    assert batch.tokens[0, 64:].tolist() == [501, 501, 501, 7, 8, 500]
    assert batch.position_ids[0, 64:].tolist() == [64, 65, 66, 0, 1, 64]
    assert batch.predict_at.tolist() == [63, 64, 65, 67, 63]
    assert batch.targets.tolist() == [501, 501, 501, 8, 500]


def test_prompts_are_shared_among_their_own_samples_alone() -> None:
    batch = make_micro_batch([*group(70, 5, 2, 9), *group(64, 1, 30, first=3)], share_prompts=True)
    assert batch.lengths == (94, 79, 1, 5, 2)
    assert batch.prompts == ((0, 0), (0, 0), (0, 64), (94, 70), (94, 70))


@pytest.mark.parametrize(
    "samples",
    [
        group(63, 1, 2),  # short
        [*group(64, 1), *group(64, 1, first=1)],  # not the same tokens
        [*group(64, 1), *group(65, 1)],  # not the same length
        [sample([1] * 70, [0] * 70), sample([1] * 70, [0] * 70)],  # no answer
    ],
)
def test_other_prompts_are_not_shared(samples: list[LearnerSample]) -> None:
    assert set(make_micro_batch(samples, share_prompts=True).prompts) == {(0, 0)}


def test_equal_samples_share_their_prompt_and_keep_their_answers() -> None:
    batch = make_micro_batch(group(64, 2, 2), share_prompts=True)
    assert (batch.lengths, batch.numbers) == ((66, 2), (0, 1))


def test_sample_whose_first_token_was_written_by_the_model_is_refused() -> None:
    """It would be predicted from the last token of the sample before it."""
    with pytest.raises(AssertionError, match="first token is its prompt's"):
        make_micro_batch([sample([1, 2], [0, 1]), sample([3, 4], [1, 1])])


@pytest.mark.parametrize(
    "column", ["behaviour_logprobs", "advantages", "weights", "old_logprobs", "reference_logprobs", "values", "returns"]
)
@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan")])
def test_input_sum_is_finite_exactly_when_every_column_is(column: str, value: float) -> None:
    batch = replace(make_micro_batch([sample([7, 8], [0, 1])]), **{column: torch.tensor([value])})  # advantage 0
    assert bool(batch.input_sum().isfinite()) == (value == 0.5)
