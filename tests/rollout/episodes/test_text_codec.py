"""Tokens and texts are those that the tokenizer itself gives, in half of its time."""

from typing import Any

import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rollout.environments.base import Chat
from rollout.episodes.chat_tokens import ChatTokens
from rollout.episodes.text_codec import TextCodec
from tests.fakes.hostile_texts import hostile_texts
from tests.fakes.tokenizer_families import FAMILIES, tokenizer_of

WORDS = "says hello to a lazy dog"
TEXTS = ("", " ", f"{WORDS}\n\n ", "Ünïcode  \u200b 狐 🦊", "\x00")
OPTIONS: tuple[dict[str, bool], ...] = ({}, {"add_special_tokens": True}, {"split_special_tokens": True}, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_texts_are_the_tokenizers_own_in_every_family(family: str) -> None:
    tokenizer, it = tokenizer_of(family), FAMILIES[family]
    codec = TextCodec(tokenizer)
    assert codec.is_plain
    for text in (*TEXTS, *hostile_texts(it.names, it.end).values()):
        for options in OPTIONS:
            expected = tokenizer.encode(text, **{"add_special_tokens": False, **options})
            assert codec.encode(text, **options) == expected
            assert codec.decode(expected, expected[:1]) == [
                tokenizer.decode(part, skip_special_tokens=False) for part in (expected, expected[:1])
            ]


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_has_the_tokens_of_the_template(family: str) -> None:
    tokenizer = tokenizer_of(family)
    messages = [{"role": "user", "content": WORDS}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ChatTokens(tokenizer).prompt(Chat(messages, [])) == expected


def test_tokenizer_that_was_told_to_cut_texts_cuts_none_here() -> None:
    tokenizer = tokenizer_of("qwen")
    whole = tokenizer.encode(WORDS, add_special_tokens=False)
    tokenizer.encode(WORDS, truncation=True, max_length=2, add_special_tokens=False)
    assert TextCodec(tokenizer).encode(WORDS) == whole


class _Backwards(PreTrainedTokenizerFast):
    def _encode_plus(self, text: Any, **options: Any) -> Any:
        return super()._encode_plus(text[::-1], **options)

    def _decode(self, token_ids: Any, **options: Any) -> str:
        return str(super()._decode(token_ids, **options))[::-1]


def test_tokenizer_that_has_a_way_of_its_own_is_asked_in_it() -> None:
    plain = tokenizer_of("qwen")
    codec = TextCodec(_Backwards(tokenizer_object=plain.backend_tokenizer))
    assert codec.encode(WORDS) == plain.encode(WORDS[::-1], add_special_tokens=False)
    assert codec.decode(plain.encode(WORDS)) == [WORDS[::-1]]
    assert TextCodec(ByT5Tokenizer()).encode(WORDS) == ByT5Tokenizer().encode(WORDS, add_special_tokens=False)


def test_spaces_that_the_tokenizer_takes_out_of_texts_stay_out() -> None:
    plain = tokenizer_of("qwen")
    tidy = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, clean_up_tokenization_spaces=True)
    ids = plain.encode("hello , dog")
    assert TextCodec(tidy).decode(ids) == [tidy.decode(ids)]
