"""`sluice tinker`: wrong options end with a sentence, before a model is loaded."""

from pathlib import Path

import pytest

from deploy.tinker.command import main
from protocol.disk.lock import file_lock

KEY_RULE = "needs a key of 16 characters that begins with tml-."


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--host", "0.0.0.0"], 1, "--host 0.0.0.0 is open to other machines. Give --key-file, or use 127.0.0.1."),  # noqa: S104
        (["--key-file", "short"], 1, KEY_RULE),
        (["--key-file", "none"], 1, "--key-file none cannot be read"),
        (["--engine-args", "[1]"], 2, "--engine-args [1] is no JSON object."),
        ([], 2, "MODEL = /none is not a folder."),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str],
    status: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("tml-1")

    assert main(["/none", "--port", "0", *options]) == status
    assert text in capsys.readouterr().err


def test_a_folder_has_one_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_lock(tmp_path / "lock"):
        status = main(["/none", "--port", "0", "--folder", str(tmp_path)])

    assert status == 1
    assert f"{tmp_path} is used by another service. Give another --folder." in capsys.readouterr().err
