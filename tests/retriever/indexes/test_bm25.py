"""BM25 against its formula, and the order of what is found."""

import math
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import OperatorError
from retriever.corpus import Corpus, title_of
from retriever.indexes.bm25 import K1, B, Bm25Index, _best_rows, words_of
from retriever.indexes.index import Hit

CONTENTS = [
    '"Belarus"\nBelarus is a country; alpha-2 code BY.',
    '"Brest"\nBrest is a subdivision of the country Belarus; code BY-BR.',
    '"Belarusian ruble"\nBelarusian ruble is a currency; code BYN.',
    "A text without a title that mentions the country Belarus, the country Belarus and the country Belarus.",
]


def corpus_of(contents: list[str]) -> Corpus:
    return Corpus([str(i) for i in range(len(contents))], contents, digest="test")


def score_by_the_formula(contents: list[str], query: str, row: int) -> float:
    """Lucene's BM25, term by term; a title counts three times."""
    documents = [words_of(text) + 2 * words_of(title_of(text)) for text in contents]
    mean_length = sum(map(len, documents)) / len(documents)
    total = 0.0
    for word in words_of(query):
        containing = sum(word in document for document in documents)
        idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
        count = Counter(documents[row])[word]
        total += idf * count / (count + K1 * (1 - B + B * len(documents[row]) / mean_length))
    return total


def test_search_scores_are_those_of_the_formula() -> None:
    index = Bm25Index.build(corpus_of(CONTENTS))
    query = "country Belarus code"
    hits = index.search([query], 4)[0]
    assert sorted(hit.row for hit in hits) == [0, 1, 2, 3]
    for hit in hits:
        assert hit.score == pytest.approx(score_by_the_formula(CONTENTS, query, hit.row), rel=1e-5)


def test_search_puts_the_page_called_so_first() -> None:
    """The second text is shorter and names both words, so without the title's weight it would win."""
    contents = [
        '"Belarus"\nBelarus is a country; alpha-2 code BY; alpha-3 code BLR; numeric code 112.',
        '"Brest"\nBrest, country Belarus.',
        '"Oslo"\nOslo is the capital of the country Norway.',
    ]
    assert Bm25Index.build(corpus_of(contents)).search(["country Belarus"], 1)[0][0].row == 0


def test_search_finds_nothing_when_no_word_is_shared() -> None:
    index = Bm25Index.build(corpus_of(CONTENTS))
    assert index.search(["zebra"], 3)[0] == []
    assert index.search([""], 3)[0] == []


def test_search_returns_fewer_than_topk_when_fewer_share_a_word() -> None:
    assert [hit.row for hit in Bm25Index.build(corpus_of(CONTENTS)).search(["ruble"], 100)[0]] == [2]


def test_search_decides_equal_scores_by_corpus_order() -> None:
    index = Bm25Index.build(corpus_of(["same words"] * 50 + ["other text"]))
    assert [hit.row for hit in index.search(["same"], 5)[0]] == [0, 1, 2, 3, 4]


def test_index_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    index = Bm25Index.build(corpus_of(CONTENTS))
    index.save(tmp_path)
    hits: list[Hit] = index.search(["country Belarus"], 4)[0]
    assert Bm25Index.load(tmp_path).search(["country Belarus"], 4)[0] == hits
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json"}


def test_search_answers_queries_in_their_order() -> None:
    found = Bm25Index.build(corpus_of(CONTENTS)).search(["ruble", "zebra", "brest"], 1)
    assert [[hit.row for hit in hits] for hits in found] == [[2], [], [1]]


def test_search_counts_the_first_512_words_of_a_query() -> None:
    index = Bm25Index.build(corpus_of(CONTENTS))
    (inside, outside) = index.search(["zebra " * 511 + "ruble", "zebra " * 512 + "ruble"], 1)
    assert ([hit.row for hit in inside], outside) == ([2], [])


def test_build_refuses_a_corpus_without_words() -> None:
    with pytest.raises(OperatorError, match="no document of the corpus holds a letter or digit"):
        Bm25Index.build(corpus_of(["?", "!"]))


def test_words_inside_a_thai_sentence_and_words_of_hindi_are_found() -> None:
    index = Bm25Index.build(corpus_of(["กรุงเทพเป็นเมืองหลวงของประเทศไทย", "पुस्तक एक किताब है", "कमल एक फूल है"]))
    assert [[hit.row for hit in hits[:1]] for hits in index.search(["ไทย", "किताब", "कमल"], 3)] == [[0], [1], [2]]
    assert index.search(["कुतुब"], 3) == [[]]  # its consonants, each alone, are in the second text


@pytest.mark.parametrize("num_documents", [0, 1, 127, 128, 129, 1000])
@pytest.mark.parametrize("topk", [1, 3, 200, 5000])
def test_best_rows_are_those_of_sorting_all_scores(num_documents: int, topk: int) -> None:
    chance = np.random.default_rng(num_documents)
    # Few different scores, and many documents that share no word: ties at every border.
    scores = (chance.integers(0, 6, num_documents) * chance.integers(0, 2, num_documents)).astype(np.float32)
    found = [row for row in range(num_documents) if scores[row] > 0]
    assert _best_rows(scores, topk) == sorted(found, key=lambda row: (-scores[row], row))[:topk]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is the alpha-2 code?", ["what", "is", "the", "alpha", "2", "code"]),
        ("Curaçao ÅLAND Türkiye", ["curacao", "aland", "turkiye"]),
        ("ﬁve ½", ["five", "1", "2"]),
        ("snake_case", ["snake", "case"]),
        ("東京へ МИНСК 서울", ["東", "京", "へ", "минск", unicodedata.normalize("NFKD", "서울")]),
        ("हिन्दी किताब মানুষ தமிழ்", ["हिनदी", "किताब", "মানুষ", "தமிழ"]),
        ("ไทย เมือง ๒๓", ["ไ", "ท", "ย", "เ", "มื", "อ", "ง", "๒๓"]),
        ("ភ្នំពេញ မြန် ລາວ ދިވެހި", ["ភ", "នំ", "ពេ", "ញ", "မြ", "န", "ລ", "າ", "ວ", "ދިވެހި"]),
        ("?!", []),
    ],
)
def test_words_are_folded_lower_case_runs_of_letters_and_digits(text: str, expected: list[str]) -> None:
    assert words_of(text) == expected
