"""The check that another model of a run reads the policy's tokens as the policy does, by the names of all tokens and by
a text that both tokenize.
"""

from pathlib import Path
from typing import Any

from protocol.errors import OperatorError

# Words, digits, code, white space, accents, other scripts and an emoji: different tokenizers split some differently.
_TEXT = "The answer is 12,345.67: f(x) = x**2\n\n    return [naïve, Größe]  # 你好, мир 🙂"


def check_same_tokens(setting: str, folder: Path, policy: Path, *, trust_remote_code: bool = False) -> None:
    """Raise OperatorError when the tokenizer in `folder` gives the text other tokens than the policy's.

    setting: name of the setting that names the folder. One may lack special tokens of the other. trust_remote_code:
    whether their own code may run.
    """
    named = ((setting, folder), ("policy.model", policy))
    other, own = (read_tokenizer(*each, trust_remote_code) for each in named)
    ids, other_ids = ({**each.get_vocab(), **each.get_added_vocab()} for each in (own, other))
    others_names = {token: name for name, token in other_ids.items()}
    found, expected = (each(_TEXT, add_special_tokens=False)["input_ids"] for each in (other, own))
    difference = ""
    if moved := [name for name, token in ids.items() if other_ids.get(name, token) != token]:
        difference = f"{moved[0]} is token {other_ids[moved[0]]} in it and {ids[moved[0]]}"
    elif renamed := [(token, name) for name, token in ids.items() if name not in other_ids and token in others_names]:
        token, name = renamed[0]
        difference = f"token {token} is {others_names[token]} in it and {name}"
    elif found != expected:
        place = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), 0)
        difference = f"token {place} of a text is {found[place : place + 1]} in it and {expected[place : place + 1]}"
    if difference:
        raise OperatorError(
            f"{setting} has another tokenizer than policy.model: {difference} in the policy. Use a model with the "
            f"policy's tokenizer, or leave {setting} empty."
        )


def read_tokenizer(setting: str, folder: Path, trust_remote_code: bool) -> Any:
    """Return the tokenizer in `folder`. Raises: OperatorError with the name of the setting."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise OperatorError(f"The tokenizer of {setting} cannot be read: {problem}. Complete its files.") from error
