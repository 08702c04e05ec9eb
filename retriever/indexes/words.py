"""How text becomes the words an index knows; documents and queries must go through the same function."""

import re
import unicodedata

# Part of an index's manifest: an index made by other rules is built again.
RULES = "nfkd-lower-alphanumeric-1"

_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Return the words: accents folded away (NFKD), lower case, runs of letters and digits of any script.

    Example: words_of("Curaçao: CW-531") == ["curacao", "cw", "531"]
    """
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return _WORD.findall(text.lower())
