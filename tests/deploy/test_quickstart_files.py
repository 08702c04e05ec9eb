"""The quick start's files as its users load them: data sets, demonstrations, tokenizer and model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.quickstart.build import STAMP, QuickstartSettings, build_quickstart
from deploy.quickstart.demonstrations import Recipe
from deploy.quickstart.passages import TAGS

SETTINGS = QuickstartSettings(seed=5, recipe=Recipe(num_rows=400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart")
    assert build_quickstart(out, SETTINGS)
    return out


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_second_build_writes_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert not build_quickstart(folder, SETTINGS)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_build_starts_again_when_the_stamp_is_of_other_settings(tmp_path: Path) -> None:
    build_quickstart(tmp_path, QuickstartSettings(seed=1, recipe=Recipe(num_rows=10)))
    assert build_quickstart(tmp_path, QuickstartSettings(seed=1, recipe=Recipe(num_rows=20)))
    assert len(read(tmp_path / "warmstart.jsonl")) == 20


def test_build_starts_again_when_the_stamp_was_cut_short_or_a_file_is_gone(tmp_path: Path) -> None:
    settings = QuickstartSettings(seed=1, recipe=Recipe(num_rows=10))
    build_quickstart(tmp_path, settings)
    (tmp_path / STAMP).write_text('{"key": "12')
    assert build_quickstart(tmp_path, settings)
    (tmp_path / "eval.jsonl").unlink()
    assert build_quickstart(tmp_path, settings)
    assert not build_quickstart(tmp_path, settings)


def test_same_seed_gives_the_same_bytes_and_another_seed_other_ones(folder: Path, tmp_path: Path) -> None:
    build_quickstart(tmp_path / "same", SETTINGS)
    build_quickstart(tmp_path / "other", QuickstartSettings(seed=6, recipe=Recipe(num_rows=400)))
    for name in ("train.jsonl", "eval.jsonl", "warmstart.jsonl", "model/model.safetensors"):
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (folder / name).read_bytes()


def test_no_held_out_entity_is_in_a_training_question_or_demonstration(folder: Path) -> None:
    held_out = {str(row["entity"]) for row in read(folder / "eval.jsonl")}
    asked = {str(row["entity"]) for row in read(folder / "train.jsonl")}
    assert not held_out & asked
    prompts = {str(row["prompt"]) for row in read(folder / "eval.jsonl")}
    shown = {row["segments"][0]["text"] for row in read(folder / "warmstart.jsonl")}
    assert not prompts & shown


def test_demonstration_weights_follow_who_wrote_the_text(folder: Path) -> None:
    for row in read(folder / "warmstart.jsonl"):
        prompt, *rest = row["segments"]
        assert prompt["weight"] == 0.0
        for segment in rest:
            is_observation = segment["text"].startswith("<information>")
            assert segment["weight"] == (0.3 if is_observation else 1.0)
        assert rest[-1]["text"].endswith("</answer>")


def test_segments_tokenised_apart_are_the_whole_text_tokenised(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row in read(folder / "warmstart.jsonl")[:100]:
        texts = [segment["text"] for segment in row["segments"]]
        apart = [token for text in texts for token in tokenizer(text).input_ids]
        assert apart == tokenizer("".join(texts)).input_ids


def test_both_ways_to_load_the_tokenizer_give_the_same_tokens(folder: Path) -> None:
    """transformers puts the architecture's own pre-tokenizer in place of the file's; the texts here must not notice."""
    by_architecture = AutoTokenizer.from_pretrained(folder / "model")
    by_file = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    texts = [str(row["contents"]) for row in read(folder / "corpus.jsonl")]
    texts += [str(row["prompt"]) for row in read(folder / "eval.jsonl")]
    differing = [text for text in texts if by_architecture(text).input_ids != by_file.encode(text).ids]
    assert differing == []


def test_tags_are_single_tokens_that_decoding_keeps(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for tag in TAGS:
        ids = tokenizer(tag).input_ids
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag


def test_a_name_has_the_same_tokens_in_question_query_and_passage(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    name = tokenizer(" Cote d'Ivoire").input_ids
    texts = (
        "of the country Cote d'Ivoire?",
        "<search> country Cote d'Ivoire</search>",
        "in Cote d'Ivoire.</information>",
    )
    for text in texts:
        ids = tokenizer(text).input_ids
        assert any(ids[i : i + len(name)] == name for i in range(len(ids)))


def test_model_loads_with_half_a_million_untied_parameters(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 558_464
    assert not model.config.tie_word_embeddings
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder / "model")) == 512


def test_command_says_what_to_change_when_the_folder_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run_command("--out", str(blocked / "inside"))
    assert result.returncode == 1
    assert result.stderr == (
        f"quickstart: {blocked}/inside cannot be written (Not a directory). Set --out to a folder with 100 MB free.\n"
    )


def test_command_refuses_a_negative_seed(tmp_path: Path) -> None:
    result = run_command("--out", str(tmp_path), "--seed=-1")
    assert result.returncode == 2
    assert "argument --seed: '-1' is not a whole number of 0 or more" in result.stderr


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.quickstart", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
