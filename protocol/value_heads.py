"""The heads of reward models and critics in the folders of other trainers. Shared by rewards and the learner."""

import re
from collections.abc import Iterable, Mapping, Sequence

HEAD_NAMES = (
    "score",  # transformers' sequence classification, TRL
    "value_head",  # OpenRLHF
    "v_head.summary",  # TRL's and trlx's models with a value head
    "v_head",  # DeepSpeed-Chat
    "regression_head",
    "rm_head",
    "reward_head",
    "classifier",
)
"""Modules that turn the last hidden state into one number, without .weight and .bias."""

WRAPPERS = ("rwtransformer.", "pretrained_model.")
"""Prefixes of the body's tensors in wrapped models: DeepSpeed-Chat's, TRL's."""

_NOT_HEADS = ("lm_head.", "embed_out.", "output.")  # heads of language models
_LANGUAGE_HEAD = re.compile(r"(rwtransformer\.|pretrained_model\.)?(lm_head|embed_out|output)\.(weight|bias)")
_CONSTANT = re.compile(r"\.(attn|attention)\.masked_bias$|\.(inv_freq|position_ids)$")
_MASK = re.compile(r"\.(attn|attention)\.bias$")


def find_head(unused: Mapping[str, Sequence[int]], hidden_size: int) -> str | None:
    """Return the name of the head among the tensors that a body does not use, without .weight; None: there is none.

    unused: shapes by name. Raises: ValueError naming the tensors, when they are no single linear head of one number.
    """
    shapes = {name: tuple(shape) for name, shape in unused.items() if not _is_of_language_model(name, shape)}
    modules = sorted({name.removesuffix(".weight").removesuffix(".bias") for name in shapes})
    if not modules:
        return None
    if len(modules) > 1 or modules[0] not in HEAD_NAMES or f"{modules[0]}.weight" not in shapes:
        raise ValueError(f"it has the tensors {_list(shapes)}, and one head named {', '.join(HEAD_NAMES)} was expected")
    (module,) = modules
    if (found := shapes[f"{module}.weight"]) != (1, hidden_size):
        raise ValueError(f"its head {module} has the shape {found}, expected {(1, hidden_size)}, one number a token")
    if shapes.get(f"{module}.bias", (1,)) != (1,):
        raise ValueError(f"its head {module} has a bias of the shape {shapes[f'{module}.bias']}, expected (1,)")
    return module


def is_constant(name: str, shape: Sequence[int] | None) -> bool:
    """Return whether it is a constant that old folders hold: a causal mask, [1, 1, T, T], or positions' numbers.

    shape: None: not known, as in .bin files.
    """
    is_square = shape is None or (len(shape) > 1 and shape[-1] == shape[-2] and {*shape[:-2]} <= {1})
    return _CONSTANT.search(name) is not None or (is_square and _MASK.search(name) is not None)


def is_language_head(name: str) -> bool:
    """Return whether a tensor's name is of a language model's head, in a wrapped model too."""
    return _LANGUAGE_HEAD.fullmatch(name) is not None


def is_head(name: str) -> bool:
    """Return whether a tensor's name is of such a head, with .weight or .bias."""
    return name.rpartition(".")[0] in HEAD_NAMES


def read_scale(config: object) -> tuple[float, float]:
    """Return mean and standard deviation of a reward model's rewards, by its config; (0, 1): they stay as they are.

    OpenRLHF writes both at every evaluation, and `normalize_reward: false` when the model was trained without them.
    """
    if getattr(config, "normalize_reward", None) is False:
        return 0.0, 1.0
    return float(getattr(config, "mean", None) or 0.0), float(getattr(config, "std", None) or 1.0)


def _is_of_language_model(name: str, shape: Sequence[int]) -> bool:
    has_vocabulary = tuple(shape[:1]) != (1,)  # trainers of reward models also put one row into a head of such a name
    return has_vocabulary and any(f".{head}" in f".{name}" for head in _NOT_HEADS)


def _list(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - 4} more" if len(first) > 4 else ""
    return ", ".join(first[:4]) + more
