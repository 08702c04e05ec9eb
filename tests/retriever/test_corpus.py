"""Reading a corpus, and what is said of a bad one."""

from pathlib import Path

import pytest

from protocol.errors import OperatorError
from retriever.corpus import digest_of, open_corpus, read_corpus, title_of


def test_read_corpus_keeps_file_order_and_passes_over_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "b", "contents": "two", "more": 1}\n\n{"id": 7, "contents": "one"}\n')
    corpus = read_corpus(path, tmp_path)
    assert (list(corpus.ids), list(corpus.contents), len(corpus)) == (["b", "7"], ["two", "one"], 2)


def test_corpus_is_the_same_when_it_is_opened_again_and_the_jsonl_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        '{"id": "b", "contents": "tw\u00f6\\nlines"}\n{"id": "", "contents": ""}\n{"id": 7, "contents": "one"}\n'
    )
    corpus = read_corpus(path, tmp_path)
    assert digest_of(path) == corpus.digest
    path.unlink()
    again = open_corpus(tmp_path, corpus.digest)
    assert (list(again.ids), list(again.contents)) == (["b", "", "7"], ["tw\u00f6\nlines", "", "one"])
    assert (again.contents[-1], again.contents[0:2]) == ("one", ["tw\u00f6\nlines", ""])
    assert again.ids[-3] == "b"
    for row in (3, -4):
        with pytest.raises(IndexError):
            again.contents[row]


def test_byte_order_mark_of_an_editor_is_no_part_of_the_first_document(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "b", "contents": "two"}\r\n{"id": "c", "contents": "three"}')
    assert list(read_corpus(path, tmp_path).ids) == ["b", "c"]


def test_corpus_of_empty_texts_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "", "contents": ""}\n')
    assert list(read_corpus(path, tmp_path).contents) == [""]


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
        read_corpus(path, tmp_path)
    assert str(error.value).startswith(f"retriever: line 2 of {path} is not a document: {problem}")


def test_read_corpus_says_when_the_file_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"missing.jsonl cannot be read \(No such file or directory\)"):
        read_corpus(tmp_path / "missing.jsonl", tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(OperatorError, match=r"empty.jsonl has no document"):
        read_corpus(tmp_path / "empty.jsonl", tmp_path)


def test_title_is_the_quoted_first_line() -> None:
    assert title_of('"The "Big" One"\ntext') == 'The "Big" One'
    assert title_of("no title\ntext") == ""
    assert title_of('text that ends with "a quote"') == ""
