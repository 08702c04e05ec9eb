"""Words of documents and queries."""

import pytest

from retriever.indexes.words import words_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is the alpha-2 code?", ["what", "is", "the", "alpha", "2", "code"]),
        ("Curaçao ÅLAND Türkiye", ["curacao", "aland", "turkiye"]),
        ("ﬁve ½", ["five", "1", "2"]),
        ("snake_case", ["snake", "case"]),
        ("東京 МИНСК", ["東京", "минск"]),
        ("?!", []),
    ],
)
def test_words_are_folded_lower_case_runs_of_letters_and_digits(text: str, expected: list[str]) -> None:
    assert words_of(text) == expected
