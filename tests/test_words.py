"""Documentation uses the words of the field, and names are nouns and verbs."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_ROOMS = ("protocol", "rollout", "rewards", "retriever", "learner", "deploy")
_MAX_DIALECT = 35.0  # dialect words per 10,000 words, above the usual share of each
_MAX_PARTICIPLES = 15  # names of classes and functions

# Dialect word: its usual share per 10,000 words in well-kept projects of the field.
_USUAL_SHARE = {
    "what": 8.2, "whose": 7.7, "whoever": 0.3, "told": 0.1, "tells": 0.4, "tell": 0.5, "of them": 0.9, "nobody": 0.1,
    "beside": 0.3, "anew": 0.1, "meanwhile": 1.2, "goes on": 0.2, "go on": 0.3, "given up": 0.1, "gives up": 0.1,
    "stands": 1.2, "mend": 0.1, "mended": 0.1, "wish": 0.3, "is said": 0.3, "says so": 0.3, "so many": 0.3,
    "by itself": 0.5, "is left out": 0.5, "obeys": 0.1, "disown": 0.1, "hopeless": 0.1,
}  # fmt: skip

_PARTICIPLE = re.compile(
    r"_?([A-Z]?[a-z]+ed|[Tt]old|[Ss]aid|[Hh]eld|[Ll]ost|[Dd]rawn|[Kk]ept|[Gg]one|[Tt]aken|[Gg]iven|[Ss]een|[Ss]hown"
    r"|[Ww]ritten|[Kk]nown|[Cc]hosen)"
)
_NOUNS = {"Shared", "Unused", "Weighted"}


def test_documentation_uses_the_words_of_the_field() -> None:
    text = " ".join(_words(text) for text in _documentation())
    per_word = 10_000 / len(text.split())
    shares = {word: len(re.findall(rf"\b{word}\b", text)) * per_word for word in _USUAL_SHARE}
    excess = {word: share - _USUAL_SHARE[word] for word, share in shares.items() if share > _USUAL_SHARE[word]}
    assert sum(excess.values()) <= _MAX_DIALECT, {word: round(share, 1) for word, share in excess.items()}


def test_no_class_or_function_is_named_by_a_participle_alone() -> None:
    names = {name for path in _files() for name in _names(path) if _PARTICIPLE.fullmatch(name)}
    assert len(names - _NOUNS) <= _MAX_PARTICIPLES, sorted(names - _NOUNS)


def _files() -> Iterator[Path]:
    for room in _ROOMS:
        yield from sorted((_ROOT / room).rglob("*.py"))


def _documentation() -> Iterator[str]:
    for path in _files():
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    for path in sorted(_ROOT.rglob("*.md")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(_ROOT).parts)
        if path.name != "CHANGELOG.md" and not is_hidden:
            yield path.read_text()


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
