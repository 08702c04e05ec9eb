"""Tokenizers of eight families in small: what cuts text into tokens, the names of control tokens, the chat template.

Each has its family's real shape: bytes or pieces with a fallback to bytes, what happens to text before names are looked
for, which names are control tokens. Vocabularies and templates are of our own making; all templates tell of tools.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = "the quick brown fox says hello to a lazy dog: name, arguments, tool call and content of it"


@dataclass(frozen=True)
class Family:
    """One family."""

    core: Callable[[], Tokenizer]  # what makes tokens of letters, without control tokens
    control: Sequence[AddedToken]  # the control tokens
    bos: str | None  # name of the one that begins a text; None: there is none
    end: str  # name of the one that ends a turn
    template: str  # chat template
    words: tuple[str, ...] = ()  # added tokens that are not control tokens

    @property
    def names(self) -> list[str]:
        return [str(token.content) for token in self.control]


def _special(*names: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, **{"normalized": False, **flags}) for name in names]


def of_bytes() -> Tokenizer:
    """GPT-2's, Qwen's, Llama 3's and DeepSeek's: BPE over bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([_TEXT] * 9, trainer)
    return core


def of_pieces(begins_with_space: bool, names: Sequence[str]) -> Tokenizer:
    """Llama 2's, Mistral's, Phi's and Gemma's: BPE over pieces, bytes for what is unknown.

    names: control tokens, which stand in the vocabulary of pieces too.
    """
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(
        ["▁" + _TEXT.replace(" ", "▁")] * 9, trainers.BpeTrainer(vocab_size=140, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *names, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    prefixed = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    core.normalizer = prefixed if begins_with_space else spaces
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def _of_likely_pieces() -> Tokenizer:
    """T5's and XLM-R's: the likeliest pieces, of text that was normalised first: odd letters made plain or left out."""
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.UnigramTrainer(
        vocab_size=160, unk_token="<unk>", special_tokens=["<unk>"], initial_alphabet=letters, show_progress=False
    )
    core.train_from_iterator([_TEXT] * 9, trainer)
    return core


def _turns(begin: str, end: str, tool_role: str = "tool") -> str:
    """Return a template. begin: what opens a turn, with {role} in it."""

    def opened(role: str) -> str:
        return "{{ '" + begin.replace("{role}", "' + " + role + " + '").replace("\n", "\\n") + "' }}"

    call = '<tool_call>{\\"name\\": .., \\"arguments\\": ..}</tool_call>'
    return (
        "{{ bos_token or '' }}"
        "{% if tools %}" + opened("'system'") + "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        '{{ "' + call + '" }}' + end + "{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}" + opened(f"'{tool_role}'") + "<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% else %}" + opened("m.role") + "{% if m.content is string %}{{ m.content | trim }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + opened("'assistant'")
        + "{% endif %}"
    )


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>")
_LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
          "<|eom_id|>", "<|python_tag|>", "<|reserved_special_token_0|>")  # fmt: skip
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]", "[TOOL_CALLS]")  # fmt: skip
_GEMMA = ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<unused0>")
_DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"  # a wide bar
    for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁outputs▁end")
)
_PHI = ("<s>", "</s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_T5 = ("</s>", "<pad>", "<\uff5cturn\uff5c>", "<|end of turn|>", "<extra_id_0>")
_OLMO = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

FAMILIES = {
    "qwen": Family(
        of_bytes,
        _special(*_QWEN),
        None,
        "<|im_end|>",
        _turns("<|im_start|>{role}\n", "<|im_end|>\n", "user"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    "llama3": Family(
        of_bytes,
        _special(*_LLAMA),
        "<|begin_of_text|>",
        "<|eot_id|>",
        _turns("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "ipython"),
    ),
    "mistral": Family(
        functools.partial(of_pieces, True, _MISTRAL),
        _special(*_MISTRAL),
        "<s>",
        "</s>",
        _turns("[INST]{role} ", "</s>"),
    ),
    "gemma": Family(
        functools.partial(of_pieces, False, _GEMMA),
        _special(*_GEMMA),
        "<bos>",
        "<end_of_turn>",
        _turns("<start_of_turn>{role}\n", "<end_of_turn>\n", "user"),
    ),
    "deepseek": Family(
        of_bytes,
        _special(*_DEEPSEEK, normalized=True),
        _DEEPSEEK[0],
        _DEEPSEEK[1],
        _turns(_DEEPSEEK[2] + "{role}: ", _DEEPSEEK[1]),
    ),
    "phi": Family(
        functools.partial(of_pieces, True, _PHI),
        _special(*_PHI, rstrip=True),
        "<s>",
        "<|end|>",
        _turns("<|{role}|>\n", "<|end|>\n"),
    ),
    "t5": Family(
        _of_likely_pieces,
        _special(*_T5, normalized=True),
        None,
        "</s>",
        _turns(_T5[2] + "{role}: ", "</s>"),
    ),
    "upper_and_lower": Family(
        lambda: _lowered(of_bytes()),
        _special(*_OLMO, normalized=True),
        None,
        "<|im_end|>",
        _turns("<|im_start|>{role}\n", "<|im_end|>\n"),
    ),
}


def _lowered(core: Tokenizer) -> Tokenizer:
    """Return it for uncased text: names are found in any case, with and without accents."""
    core.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    return core


@functools.cache
def tokenizer_of(family: str) -> Any:
    """Return a family's tokenizer, with its chat template."""
    it = FAMILIES[family]
    core = it.core()
    core.add_special_tokens(list(it.control))
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in it.words])
    unknown = {"unk_token": "<unk>"} if core.token_to_id("<unk>") is not None else {}
    others = [name for name in it.names if name not in (it.end, it.bos)]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=it.template,
        bos_token=it.bos,
        eos_token=it.end,
        additional_special_tokens=others,
        **unknown,
    )
