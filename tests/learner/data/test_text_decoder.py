"""Texts of a conversation's pieces."""

import json
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken

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
