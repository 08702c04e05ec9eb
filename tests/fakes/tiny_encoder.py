"""Random BERT models with a word tokenizer, as users' encoders are on disk."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

_WORDS = [
    "query",
    "passage",
    ":",
    "oslo",
    "bergen",
    "turku",
    "is",
    "a",
    "capital",
    "town",
    "of",
    "norway",
    "finland",
    "where",
    "what",
]
_TAGS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def make_tiny_encoder(folder: Path, dimension: int = 32) -> Path:
    """Return `folder`, now holding a random encoder and its tokenizer."""
    torch.manual_seed(0)
    BertModel(_config(dimension)).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def _config(dimension: int) -> BertConfig:
    return BertConfig(
        vocab_size=len(_TAGS) + len(_WORDS),
        hidden_size=dimension,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.5,
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words; all others are unknown."""
    vocabulary = {word: index for index, word in enumerate([*_TAGS, *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
