"""The documents of a retriever: read once from JSONL `{"id", "contents"}`, then kept in the index folder."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel, ValidationError

from protocol.errors import OperatorError
from retriever.texts import Texts, TextsWriter

_TITLE = re.compile(r'\s*"(.*)"\s*')


class Document(BaseModel):
    """One document."""

    id: str | int  # numbers become text
    contents: str  # optional title in double quotes on the first line, then the text


@dataclass(frozen=True)
class Corpus:
    """All documents in file order."""

    ids: Sequence[str]
    contents: Sequence[str]  # one per document
    digest: str  # blake3 of the JSONL file; an index stores it

    def __len__(self) -> int:
        return len(self.ids)


def digest_of(path: Path) -> str:
    """Return the digest of a corpus without reading its documents. Raises: OperatorError when it cannot be read."""
    try:
        return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def read_corpus(path: Path, folder: Path) -> Corpus:
    """Return the documents of a JSONL file, and write them to `folder`; skip empty lines.

    Raises: OperatorError for an unreadable or empty file, or an invalid line (named by its number); OSError when
    `folder` cannot be written.
    """
    digest = blake3()
    ids, contents = TextsWriter(folder, "ids"), TextsWriter(folder, "contents")
    try:
        for number, line in enumerate(_lines(path), start=1):
            digest.update(line)
            if not line.isspace():
                document = _read_document(line.removeprefix(BOM_UTF8) if number == 1 else line, path, number)
                ids.append(str(document.id))
                contents.append(document.contents)
    finally:
        ids.close()
        contents.close()
    corpus = open_corpus(folder, digest.hexdigest())
    if not len(corpus):
        raise OperatorError(f"retriever: the corpus {path} has no document. Expected one JSON object per line.")
    return corpus


def open_corpus(folder: Path, digest: str) -> Corpus:
    """Return the documents that `read_corpus` wrote. Raises: OSError or ValueError for damaged files."""
    return Corpus(Texts.open(folder, "ids"), Texts.open(folder, "contents"), digest)


def title_of(contents: str) -> str:
    """Return the title quoted on the first line, or "" without one."""
    match = _TITLE.fullmatch(contents.partition("\n")[0])
    return match.group(1) if match else ""


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> OperatorError:
    return OperatorError(
        f"retriever: the corpus {path} cannot be read ({error.strerror}). Set --corpus-path to a JSONL file."
    )


def _read_document(line: bytes, path: Path, number: int) -> Document:
    try:
        return Document.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        where = f"field {field}: " if field else ""
        raise OperatorError(
            f"retriever: line {number} of {path} is not a document: {where}{first['msg']}. "
            'Expected {"id": "...", "contents": "\\"Title\\"\\nText"}.'
        ) from None
