"""`sluice tinker`: wrong options end with a sentence, before a model is loaded."""

from pathlib import Path

import pytest

from deploy.tinker.adapters import BaseModel
from deploy.tinker.command import _check_base, _engine_of, _parser, main
from protocol.disk.lock import file_lock
from protocol.errors import OperatorError
from tests.fakes.tiny_models import make_tiny_model

KEY_RULE = "needs a key of 16 characters that begins with tml-."


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--host", "0.0.0.0"], 1, "--host 0.0.0.0 is open to other machines. Give --key-file, or use 127.0.0.1."),  # noqa: S104
        (["--key-file", "short"], 1, KEY_RULE),
        (["--key-file", "none"], 1, "--key-file none cannot be read"),
        (["--engine-args", "[1]"], 2, "--engine-args [1] is no JSON object."),
        (["--max-rank", "600"], 1, "--max-rank 600 is over 512, the most that vLLM has."),
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


def test_texts_longer_than_the_model_allows_are_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(model_folder.parent / "state")
    status = main([str(model_folder), "--port", "0", "--folder", folder, "--max-tokens", "1025"])

    assert status == 1
    assert f"--max-tokens 1025 is over the 1024 positions of {model_folder}. Give 1024." in capsys.readouterr().err


def test_a_folder_has_one_base_model(model_folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", tied=True, hidden_size=32, num_layers=1, seed=1)
    moved = make_tiny_model(tmp_path / "moved", tied=True, hidden_size=32, num_layers=1)
    for model in (model_folder, moved):
        _check_base(tmp_path, model)

    with pytest.raises(OperatorError, match="has clients' weights for another base model than"):
        _check_base(tmp_path, other)


@pytest.mark.parametrize(("most", "of_engine"), [(1, 8), (64, 64), (100, 128)])
def test_vllm_starts_with_a_rank_that_it_has_a_size_for(
    most: int, of_engine: int, base: BaseModel, model_folder: Path
) -> None:
    given = _parser().parse_args([str(model_folder), "--max-rank", str(most)])
    assert _engine_of(given, model_folder, 32, base).engine_args["max_lora_rank"] == of_engine
