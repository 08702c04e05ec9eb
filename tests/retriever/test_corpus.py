"""Reading a corpus, and what is said of a bad one."""

from pathlib import Path

import pytest

from protocol.errors import OperatorError
from retriever.corpus import read_corpus, title_of


def test_read_corpus_keeps_file_order_and_passes_over_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "b", "contents": "two", "more": 1}\n\n{"id": 7, "contents": "one"}\n')
    corpus = read_corpus(path)
    assert (corpus.ids, corpus.contents, len(corpus)) == (["b", "7"], ["two", "one"], 2)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{nonsense", "Invalid JSON"),
        ('{"id": "1"}', "field contents: Field required"),
        ('{"id": "1", "contents": 3}', "field contents: Input should be a valid string"),
        ("[]", "Input should be an object"),
    ],
)
def test_read_corpus_names_the_number_of_a_bad_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "1", "contents": "good"}\n' + line + "\n")
    with pytest.raises(OperatorError) as error:
        read_corpus(path)
    assert str(error.value).startswith(f"retriever: line 2 of {path} is not a document: {problem}")


def test_read_corpus_says_when_the_file_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"missing.jsonl cannot be read \(No such file or directory\)"):
        read_corpus(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(OperatorError, match=r"empty.jsonl holds no document"):
        read_corpus(tmp_path / "empty.jsonl")


def test_title_is_the_quoted_first_line() -> None:
    assert title_of('"The "Big" One"\ntext') == 'The "Big" One'
    assert title_of("no title\ntext") == ""
    assert title_of('text that ends with "a quote"') == ""
