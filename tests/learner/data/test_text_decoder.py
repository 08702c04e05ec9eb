"""Texts of a conversation's pieces."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from learner.data.text_decoder import TextDecoder
from tests.learner.report.recorded_run import save_tokenizer


def test_text_is_split_where_a_character_is_in_two_pieces(tmp_path: Path) -> None:
    tokens = save_tokenizer(tmp_path).encode("aé b").ids
    assert TextDecoder(tmp_path).texts(tokens, [1, 2, 3, 5]) == ["a", "\ufffd", "\ufffd", " b"]


@pytest.mark.parametrize(("content", "problem"), [(None, "is not there"), ("{}", "is not a tokenizer")])
def test_text_without_a_tokenizer_is_token_ids(tmp_path: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    decoder = TextDecoder(tmp_path)
    assert decoder.texts([7, 8, 9], [2, 3]) == ["7 8 ", "9 "]
    assert decoder.problem is not None
    assert problem in decoder.problem


def test_answer_has_no_end_of_a_turn_that_the_tokenizer_takes_for_text(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.add_tokens([AddedToken("<|eom|>", special=False), AddedToken("</answer>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|eom|>"), tokenizer.token_to_id("</answer>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    decoder = TextDecoder(tmp_path)
    assert decoder.answer(tokenizer.encode("a 2<|eom|>").ids, 1) == " 2"
    assert decoder.answer(tokenizer.encode("a 2</answer>").ids, 1) == " 2</answer>"


def test_broken_bytes_cost_no_more_than_text_and_text_between_them_is_whole(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    byte, texts = tokenizer.encode("é").ids[1], tokenizer.encode("aé b").ids
    tokens = [*texts, *([byte] * 20_000), *texts]
    began = time.process_time()
    shown = TextDecoder(tmp_path).token_texts(tokens)
    assert time.process_time() - began < 4.0
    assert len(shown) == len(tokens)
    assert shown[:5] == ["a", "", "é", " ", "b"]
    assert "".join(shown[-4:]) == "é b"
    assert "".join(shown).count("\ufffd") == 20_000


_ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config.json": {
                "eos_token": "<|end|>",
                "pad_token": "<|pad|>",
                "added_tokens_decoder": {
                    "LAST": {"content": "<call>", "special": False, **_ADDED},
                    "NEXT": {"content": "<|end|>", "special": True, **_ADDED},
                },
            }
        },
        {
            "tokenizer_config.json": {},
            "added_tokens.json": {"<call>": "LAST", "<|end|>": "NEXT"},
            "special_tokens_map.json": {"eos_token": {"content": "<|end|>", **_ADDED}, "pad_token": "<|pad|>"},
        },
        {
            "tokenizer_config.json": {"eos_token": "<|end|>", "additional_special_tokens": ["<|pad|>", "<call>"]},
        },
    ],
    ids=["today", "older", "names alone"],
)
def test_tokens_that_only_the_small_files_add_are_text_as_in_transformers(tmp_path: Path, files: Any) -> None:
    size = save_tokenizer(tmp_path).get_vocab_size()
    for name, content in files.items():
        if name == "tokenizer_config.json":
            content = {"tokenizer_class": "PreTrainedTokenizerFast", **content}
        text = json.dumps(content).replace('"LAST": {', f'"{size + 1}": {{').replace('"NEXT": {', f'"{size}": {{')
        (tmp_path / name).write_text(text.replace('"LAST"', str(size + 1)).replace('"NEXT"', str(size)))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    tokens = theirs.encode("a<call>é<|pad|>b<|end|>", add_special_tokens=False)
    decoder = TextDecoder(tmp_path)
    assert len(tokens) == 7
    assert decoder.texts(tokens, [len(tokens)]) == [theirs.decode(tokens)] == ["a<call>é<|pad|>b<|end|>"]
    assert decoder.answer(tokens, 1) == theirs.decode(tokens[1:-1])
