"""The small files of a model travel without its weights and are found again by their content."""

from pathlib import Path

import pytest

from protocol.errors import OperatorError
from protocol.node import small_model_files
from protocol.node.small_model_files import read_end_tokens, read_small_files, small_files_digest, write_small_files

SMALL = {"config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model", "vocab.bpe",
         "additional_chat_templates/tool_use.jinja"}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    for inner in ("onnx", "additional_chat_templates"):
        (folder / inner).mkdir(parents=True)
    for name in (*SMALL, "modeling_mine.py"):
        (folder / name).write_bytes(name.encode() + b"\xff")
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "README.md",
        ".gitattributes",
    ):
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize("with_code", [True, False])
def test_weights_their_index_and_untrusted_code_are_left_out(model: Path, with_code: bool) -> None:
    files = read_small_files(model, with_code=with_code)
    assert set(files) == SMALL | ({"modeling_mine.py"} if with_code else set())
    assert files["tokenizer.model"] == b"tokenizer.model\xff"


def test_written_files_are_the_ones_that_were_read_and_damaged_ones_are_written_again(model: Path) -> None:
    files = read_small_files(model, with_code=True)
    for _ in range(2):
        folder = write_small_files(files)
        written = (path for path in folder.rglob("*") if path.is_file())
        assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in written} == files
        (folder / "config.json").write_bytes(b"")  # a loss of power
    assert read_small_files(write_small_files(files), with_code=True) == files


def test_folders_differ_when_a_name_or_a_content_differs(model: Path) -> None:
    files = read_small_files(model, with_code=True)
    others = [{**files, "config.json": b"{}"}, {**files, "merges.txt": b""}]
    assert len({small_files_digest(each) for each in (files, *others)}) == 3
    assert len({write_small_files(each) for each in (files, *others)}) == 3


def test_too_large_files_are_refused_by_the_folder_and_the_limit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_model_files, "MAX_BYTES", 20)
    with pytest.raises(
        OperatorError, match=rf"The model folder {model} has more than 0 MiB of files other than weights"
    ):
        read_small_files(model, with_code=False)


def test_disk_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_bytes(b"a file")
    with pytest.raises(OperatorError, match=r"cannot be written to .*Set SLUICE_HOME to a writable folder"):
        write_small_files({"config.json": b"{}"})


def test_name_that_leaves_the_folder_is_refused(model: Path) -> None:
    for name in ("../config.json", "additional_chat_templates/../config.json", "/config.json"):
        with pytest.raises(ValueError, match="is not a plain file name"):
            write_small_files({name: b"{}"})


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": '{"text_config": {"eos_token_id": [1, 6]}}'}, {1, 6}),
        ({"config.json": '{"eos_token_id": 2, "text_config": {"eos_token_id": [1, 6]}}'}, {2}),
        ({"config.json": '{"text_config": {"eos_token_id": 1}}', "generation_config.json": "{}"}, set()),
        ({"config.json": "{}"}, set()),
        ({}, set()),
    ],
)
def test_end_tokens_are_those_that_vllm_takes(tmp_path: Path, files: dict[str, str], ends: set[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert read_end_tokens(tmp_path) == ends
