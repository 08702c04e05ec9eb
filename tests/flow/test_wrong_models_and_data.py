"""Models and data sets that no run can use: found before anything starts, one line each, nothing is left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flow.refusals import Wrong, expect_refusal, options_of, run_without_cluster
from tests.flow.user_run import Bring

_ROW = '{"prompt": "1 + 1 =", "label": "2"}\n'


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def _copy_model(name: str, *without: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copytree(folder / "tied", folder / name, ignore=shutil.ignore_patterns(*without))


def _cut_weights(folder: Path) -> None:
    _copy_model("cut")(folder)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


MODELS = [
    Wrong(
        "no model", 2,
        "settings: policy.model is not set. Give a model folder or a Hugging Face name.",
        {"policy.model": ""},
    ),
    Wrong(
        "missing model folder", 2,
        "settings: policy.model = {user}/nowhere is not a folder. Give one that holds a model.",
        {"policy.model": "{user}/nowhere"},
    ),
    Wrong(
        "model that the hub does not give", 2,
        r"settings: policy.model = nobody/nothing is neither a folder nor a model in reach of the Hugging Face hub "
        r"\(\w+\). Give a model folder.",
        {"policy.model": "nobody/nothing"},
        is_pattern=True,
    ),
    Wrong(
        "model without weights", 2,
        "settings: policy.model = {user}/weightless holds no weights (*.safetensors). Give a complete model.",
        {"policy.model": "{user}/weightless"},
        _copy_model("weightless", "*.safetensors"),
    ),
    Wrong(
        "model whose download was cut", 2,
        r"settings: policy.model: {user}/cut/model.safetensors cannot be read \(.+\). "
        r"Copy or download the model again.",
        {"policy.model": "{user}/cut"},
        _cut_weights,
        is_pattern=True,
    ),
    Wrong(
        "model without tokenizer", 2,
        "settings: policy.model = {user}/mute has no tokenizer. Give a complete model.",
        {"policy.model": "{user}/mute"},
        _copy_model("mute", "tokenizer*"),
    ),
    Wrong(
        "missing demonstrations", 2,
        "settings: policy.warm_start.data = {user}/none.jsonl does not exist. "
        "Give a JSONL or Parquet file, or null for no warm start.",
        {"policy.warm_start.data": "{user}/none.jsonl"},
    ),
    Wrong(
        "demonstration that is not a row", 2,
        r"data: {user}/demonstrations.jsonl line 1: has the keys \['question'\], expected .+",
        {"policy.warm_start.data": "{user}/demonstrations.jsonl"},
        lambda folder: (folder / "demonstrations.jsonl").write_text('{"question": "?"}\n', encoding="utf-8"),
        is_pattern=True,
    ),
]  # fmt: skip

DATA = [
    Wrong(
        "no data", 2,
        "settings: data.train is not set. Give a JSONL or Parquet file of prompts.",
        {"data.train": ""},
    ),
    Wrong(
        "missing file", 2,
        "data: {user}/none.jsonl does not exist. Give a JSONL or Parquet file as data.train or data.eval.",
        {"data.train": "{user}/none.jsonl"},
    ),
    Wrong(
        "line that is not JSON", 2,
        "data: {user}/broken.jsonl line 2 is not JSON: Expecting ',' delimiter at column 16.",
        {"data.train": "{user}/broken.jsonl"},
        _write("broken.jsonl", _ROW + '{"prompt": "b?"\n' + _ROW),
    ),
    Wrong(
        "empty data set", 2,
        "data: {user}/empty.jsonl has no rows. A run needs at least one prompt.",
        {"data.eval": "{user}/empty.jsonl"},
        _write("empty.jsonl", "\n"),
    ),
    Wrong(
        "missing label", 2,
        "data: {user}/bare.jsonl line 2 has no label under 'label'. Set data.label_key to one of ['answer', 'prompt'], "
        "or data.label_required to false when your reward needs none.",
        {"data.train": "{user}/bare.jsonl"},
        _write("bare.jsonl", _ROW + '{"prompt": "a?", "answer": "A"}\n'),
    ),
    Wrong(
        "prompt under another key", 2,
        "data: {user}/prompts.jsonl line 1 has question = None, expected text or a list of chat messages with role and "
        "content. Set data.prompt_key to one of ['label', 'prompt'], or fix the row.",
        {"data.prompt_key": "question"},
    ),
    Wrong(
        "prompt longer than the window", 2,
        "data: 1 of 2 rows of {user}/long.jsonl cannot be used, more than data.max_skipped_share = 0.05 allows. The "
        "first, line 2, has 300 tokens; rollout.max_context_tokens = 256 less rollout.max_response_tokens = 24 leaves "
        "232. Raise the first, or shorten the prompt.",
        {"data.train": "{user}/long.jsonl"},
        _write("long.jsonl", _ROW + json.dumps({"prompt": "x" * 300, "label": "y"}) + "\n"),
    ),
    Wrong(
        "chat without a chat template", 2,
        "data: {user}/chat.jsonl line 1 is chat messages, and policy.model has no chat template. Set "
        "data.apply_chat_template to false, which joins the messages' texts, or give a model with a template.",
        {"data.train": "{user}/chat.jsonl"},
        _write("chat.jsonl", '{"prompt": [{"role": "user", "content": "a?"}], "label": "A"}\n'),
    ),
]  # fmt: skip


@pytest.mark.parametrize("wrong", [*MODELS, *DATA], ids=str)
def test_a_wrong_model_or_data_set_is_one_line_and_leaves_nothing(wrong: Wrong, user: Bring, tmp_path: Path) -> None:
    expect_refusal(wrong, user, run_without_cluster(tmp_path / "home", options_of(wrong, user)))
    assert not (tmp_path / "home").exists()
