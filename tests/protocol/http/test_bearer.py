"""The cluster's token: reading it and asking for it."""

from pathlib import Path

import pytest

from protocol.errors import OperatorError
from protocol.http.bearer import is_authorised, read_token


def test_read_token_strips_white_space(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef\n")
    assert read_token(tmp_path / "token") == "0123456789abcdef"


@pytest.mark.parametrize("text", ["", "short", "two words of a token", "tokén-0123456789abcdef"])
def test_read_token_refuses_what_is_no_token_without_showing_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(OperatorError, match="token file ") as error:
        read_token(tmp_path / "token")
    assert not text or text not in str(error.value)


def test_read_token_says_when_the_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"cannot be read .* openssl rand .* A cluster makes its own"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"Bearer 0123456789abcdef", True),
        (b"bearer  0123456789abcdef", True),
        (b"Bearer 0123456789abcdeg", False),
        (b"Bearer ", False),
        (b"Basic 0123456789abcdef", False),
        (b"0123456789abcdef", False),
        (None, False),
    ],
)
def test_is_authorised_takes_the_exact_token_only(header: bytes | None, expected: bool) -> None:
    assert is_authorised(header, "0123456789abcdef") is expected
