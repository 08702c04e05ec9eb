"""Exceptions as one line, with the line of code that a user can change."""

import json
import sys
from pathlib import Path

import pytest

from protocol.addresses import host_and_port
from protocol.one_line import describe_error, user_line


def raised(function: object, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any error
        function(*arguments)  # type: ignore[operator]
    return _without_this_file(caught.value)


def _without_this_file(error: Exception) -> Exception:
    """Return the error as if a library had called the function: this file would count as the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def test_line_is_the_users_where_a_library_raised_what_the_user_called(tmp_path: Path) -> None:
    (tmp_path / "users_loss.py").write_text("import json\n\ndef loss(text):\n    return json.loads(text)\n")
    sys.path.insert(0, str(tmp_path))
    from users_loss import loss  # type: ignore[import-not-found]

    error = raised(loss, "{")
    assert user_line(error) == f"{tmp_path}/users_loss.py:4"
    assert describe_error(error).endswith(f" ({tmp_path}/users_loss.py:4)")


@pytest.mark.parametrize(("function", "argument"), [(json.loads, "{"), (host_and_port, "nowhere")])
def test_libraries_and_sluice_have_no_users_line(function: object, argument: str) -> None:
    error = raised(function, argument)
    assert user_line(error) is None
    assert describe_error(error).endswith(")")
