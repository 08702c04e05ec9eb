"""The question-answering scorer."""

from typing import Any

import pytest

from rewards.exact_match import answer_matches, last_answer, normalise, score_exact_match
from rewards.sample import SampleError, make_sample


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The U.S.A.", "usa"),
        ("  an   Apple, a pear ", "apple pear"),
        ("Another theory", "another theory"),
        ("don't", "dont"),
        ("É", "é"),
    ],
)
def test_normalise_is_squads(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer> BLR</answer>", "BLR"),
        ("<answer>a</answer> then <answer>b\nc</answer> more", "b\nc"),
        ("<answer>never closed", None),
        ("closed only</answer>", None),
        ("<answer>a</answer><answer>open", "a"),
        ("<answer></answer>", ""),
        ("", None),
    ],
)
def test_last_answer_is_the_last_complete_one(response: str, expected: str | None) -> None:
    assert last_answer(response) == expected


def test_accents_have_one_spelling() -> None:
    composed, decomposed = "Café à Zürich", "Cafe\u0301 a\u0300 Zu\u0308rich"
    assert composed != decomposed
    assert answer_matches(f"<answer>{composed}</answer>", [decomposed])
    assert answer_matches(f"<answer>{decomposed}</answer>", [composed])
    assert not answer_matches("<answer>Cafe a Zurich</answer>", [composed, decomposed])


def test_answer_matches_any_target_but_only_whole() -> None:
    assert answer_matches("<answer>the Netherlands</answer>", ["Holland", "Netherlands"])
    assert not answer_matches("<answer>Netherlands Antilles</answer>", ["Netherlands"])
    assert not answer_matches("Netherlands", ["Netherlands"])


@pytest.mark.parametrize(
    ("answer", "target", "is_same"),
    [
        ("(A).", "A", True),
        ("a", '"A"', True),
        ("the", "A", False),
        ("35", "3.5", False),
        ("3.5", "35", False),
        ("5", "-5", False),
        ("-5", "-5", True),
        ("1,000", "1000", True),
        ("1000", "1,000", True),
        (".5", "5", False),
        ("3.5 million", "3.5 Million.", True),
        ("10:30", "1030", False),
        ("1/2", "12", False),
        ("3.5%", "35", False),
        ("$3.5$", "3.5", True),
        ("-$5", "5", False),
        ("$-5$", "-5", True),
        ("2^3", "23", False),
        ("-5 m", "5 m", False),
        ("1.50 km", "1.5 km", True),
        ("15 km", "1.5 km", False),
        ("1.5.", "15", False),
        ("**1.5**", "1.5", True),
        ("+5", "5", True),
        ("3, 4", "34", False),
        ("covid-19", "covid 19", False),
        ("covid-19", "Covid19", True),
        ("\\$1,000", "1000", True),
        ("007", "007", True),
        ("7", "007", False),
        ("3.50", "3.5", True),
        ("the 12.", "12", True),
        ("1234567890" * 200, "1234567890" * 200, True),
    ],
)
def test_numbers_of_the_same_digits_are_not_the_same_answer(answer: str, target: str, is_same: bool) -> None:
    assert answer_matches(f"<answer>{answer}</answer>", [target]) == is_same


def test_target_of_which_normalising_leaves_nothing_is_compared_as_it_is() -> None:
    assert answer_matches("<answer>a</answer>", ["A"])
    assert not any(answer_matches(f"<answer>{answer}</answer>", ["A"]) for answer in ("", "the", "?", "B"))


@pytest.mark.parametrize(("answer", "reward"), [("72", 1.0), ("720", 0.0), ("72.0", 1.0)])
async def test_whole_number_in_a_column_of_floats_is_the_number(answer: str, reward: float) -> None:
    (score,) = await score_exact_match([make_sample(f"q <answer>{answer}</answer>", "q ", 72.0)])
    assert score.reward == reward


@pytest.mark.parametrize(
    "label",
    ["BLR", ["XX", "BLR"], {"target": "BLR"}, {"target": ["BLR"]}, {"ground_truth": {"target": ["XX", "BLR"]}}],
)
async def test_score_reads_every_form_of_label(label: Any) -> None:
    (score,) = await score_exact_match([make_sample("q <answer>blr</answer>", "q ", label)])
    assert score.reward == 1.0


async def test_score_ignores_an_answer_in_the_prompt() -> None:
    prompt = "Write <answer>BLR</answer>. "
    samples = [make_sample(prompt + "no", prompt, "BLR"), make_sample(prompt + "<answer>BLR</answer>", prompt, "BLR")]
    assert [score.reward for score in await score_exact_match(samples)] == [0.0, 1.0]


async def test_score_takes_a_number_as_label() -> None:
    (score,) = await score_exact_match([make_sample("<answer>112</answer>", None, 112)])
    assert score.reward == 1.0


# What a missing number becomes on its way, where it is not stopped.
NO_NUMBERS = [float("nan"), [1.0, float("inf")], {"ground_truth": {"target": [float("nan")]}}]


@pytest.mark.parametrize("label", [None, [], {"answer": "x"}, [None], True, *NO_NUMBERS])
async def test_score_refuses_a_label_without_target(label: Any) -> None:
    samples = [make_sample("a", "", "a"), make_sample("b", "", label)]
    with pytest.raises(SampleError, match=r"^\$\.labels\[1\] is .*, expected the answer's text"):
        await score_exact_match(samples)
