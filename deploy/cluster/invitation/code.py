"""The code of an invitation: HOST:PORT/KEY. It says where the head answers, by which key it is known, and lets in.

HOST is an address, of IPv6 in brackets. KEY is 64 characters: the head's public CURVE key (32 bytes), which is this
invitation's alone, and a token (16 bytes).
"""

import base64
import re
from dataclasses import dataclass

_FORM = re.compile(r"(?P<address>(?:[0-9]+(?:\.[0-9]+){3}|\[[0-9a-f:]+\]):[0-9]{1,5})/(?P<key>[A-Za-z0-9_-]{64})")
_KEY_BYTES = 32


@dataclass(frozen=True)
class Code:
    """An invitation."""

    address: str  # HOST:PORT where the head answers
    public: bytes  # the head's key of this invitation, 32 bytes: nobody else can answer in its place
    token: bytes  # whoever has it is let in, 16 bytes

    def __str__(self) -> str:
        return f"{self.address}/{base64.urlsafe_b64encode(self.public + self.token).decode()}"

    def __repr__(self) -> str:
        return f"Code({self.address})"


def read_code(text: str) -> Code | None:
    """Return the code that this text is; None when it is none."""
    if (found := _FORM.fullmatch(text)) is None:
        return None
    key = base64.urlsafe_b64decode(found["key"])
    return Code(found["address"], key[:_KEY_BYTES], key[_KEY_BYTES:])
