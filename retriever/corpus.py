"""The documents a retriever serves, read from JSONL `{"id", "contents"}`."""

import re
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel, ValidationError

from protocol.errors import OperatorError

_TITLE = re.compile(r'\s*"(.*)"\s*')


class Document(BaseModel):
    """One line of a corpus file."""

    id: str | int  # a number is taken as its text
    contents: str  # the title in double quotes on the first line, then the text; the title may be absent


@dataclass(frozen=True)
class Corpus:
    """All documents of a file."""

    ids: list[str]  # in file order
    contents: list[str]  # in the same order
    digest: str  # blake3 of the file's bytes: an index with another one is of another corpus

    def __len__(self) -> int:
        return len(self.ids)


def read_corpus(path: Path) -> Corpus:
    """Return the documents of a JSONL file; empty lines are passed over.

    Raises: OperatorError when the file cannot be read, holds no document, or a line (named by its number) is wrong.
    """
    ids: list[str] = []
    contents: list[str] = []
    digest = blake3()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                digest.update(line)
                if not line.isspace():
                    document = _read_document(line, path, number)
                    ids.append(str(document.id))
                    contents.append(document.contents)
    except OSError as error:
        raise OperatorError(
            f"retriever: the corpus {path} cannot be read ({error.strerror}). Set --corpus-path to a JSONL file."
        ) from None
    if not ids:
        raise OperatorError(f"retriever: the corpus {path} holds no document. Expected one JSON object per line.")
    return Corpus(ids, contents, digest.hexdigest())


def title_of(contents: str) -> str:
    """Return the title quoted on the first line, or "" when the first line is not in quotes."""
    match = _TITLE.fullmatch(contents.partition("\n")[0])
    return match.group(1) if match else ""


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
