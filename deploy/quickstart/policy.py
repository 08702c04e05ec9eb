"""The tiny policy: a byte-level tokenizer of 512 tokens and a Qwen2-architecture model of 0.56M random weights.

The folder loads in transformers and vLLM like any other model. Written with numpy: it takes less than a second, and no
torch.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deploy.quickstart.passages import TAGS

VOCAB_SIZE = 512
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 128, 2, 4, 384
MAX_POSITIONS = 1024
INIT_STD = 0.02
# transformers' end-of-text token for this architecture: another name would be added as token 512.
EOS = "<|endoftext|>"
# The word pattern of Qwen2 tokenizers; each digit is a word. transformers uses it instead of the one in
# tokenizer.json, so another pattern here would make the two ways to load the tokenizer differ.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_policy(
    folder: Path,
    texts: Iterable[str],
    seed: int,
    tags: Sequence[str] = TAGS,
    controls: Sequence[str] = (),
    chat_template: str | None = None,
) -> None:
    """Write tokenizer, config and random weights into `folder`; the vocabulary is learnt from `texts`.

    tags: strings that are a token each, and plain text. controls: the same, as control tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    eos_id = _write_tokenizer(folder, texts, tags, controls, chat_template)
    _write_config(folder, eos_id)
    _write_weights(folder, seed)


def _write_tokenizer(
    folder: Path, texts: Iterable[str], tags: Sequence[str], controls: Sequence[str], chat_template: str | None
) -> int:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(tags) - len(controls),
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not "special": decoding that skips special tokens must keep the tags, or the engine never sees its stop strings.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE  # few texts have few parts that come twice
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": EOS,
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            **({"chat_template": chat_template} if chat_template else {}),
        },
    )
    eos_id = tokenizer.token_to_id(EOS)
    assert isinstance(eos_id, int)
    return eos_id


def _write_config(folder: Path, eos_id: int) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
        "torch_dtype": "float32",
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos_id, "pad_token_id": eos_id, "do_sample": True})


def _write_weights(folder: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (INIT_STD * rng.standard_normal(shape)).astype(np.float32)

    def ones() -> NDArray[np.float32]:
        return np.ones(HIDDEN, dtype=np.float32)

    weights = {"model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN), "model.norm.weight": ones()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}.self_attn.{name}.weight"] = normal(HIDDEN, HIDDEN)
            weights[f"{prefix}.self_attn.{name}.bias"] = np.zeros(HIDDEN, dtype=np.float32)
        weights[f"{prefix}.self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN)
        weights[f"{prefix}.mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
        weights[f"{prefix}.input_layernorm.weight"] = ones()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones()
    weights["lm_head.weight"] = normal(VOCAB_SIZE, HIDDEN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
