"""What the start's check measures by: a model's own code, on its first layers in float32 with random weights.

Small enough to compute a long text twice on one device. Windows, chunks, caps, positions and experts come from the
model's own configuration. Depth adds nothing to them: the first layers contain each kind of layer that the model has.

The eager attention is computed in blocks of queries, so that a long text does not need all its scores at once. It is
registered with transformers as "sluice_eager". The formula, masks, windows, caps and sinks are the model's own code:
each block calls `eager_attention_forward` of the model's module with those rows of the model's mask.
Shapes: H heads, T tokens.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "sluice_eager"
# Scores of one block: 256 MiB in float32.
_MAX_SCORES = 1 << 26
_SIMPLE = (bool, int, str, type(None))
# Layers of a model that is computed as it is: other lists of its configuration may have that length.
_FEW = 5
# Endings of attributes that number a layer.
_NUMBERS = ("idx", "index", "_id", "number")


def shallow_config(auto_class: Any, config: Any, **options: Any) -> Any:
    """Return the configuration of the first layers, which contain each kind. options: of `from_config`."""
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config), **options)
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    stack = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers), None)
    if stack is None:
        return copy.deepcopy(config)
    kinds = [frozenset(_facts(layer)) for layer in stack]
    depth = next(n for n in range(1, num_layers + 1) if set(kinds[:n]) == set(kinds))
    shallow = copy.deepcopy(config)
    if depth == num_layers or num_layers <= _FEW:
        return shallow
    text = shallow.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return shallow


def make_own(auto_class: Any, config: Any, device: torch.device, **options: Any) -> Any:
    """Return a model of the configuration in float32 whose random weights are wide: a leak changes logprobs by nats.

    Usual initial weights are so small that attention hardly depends on the tokens.
    """
    torch.manual_seed(0)
    with device:
        model = auto_class.from_config(copy.deepcopy(config), dtype=torch.float32, **options).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.1)
    return model.eval()


def share_weights(own: Any, other: Any) -> None:
    """Make the other model use the weights and buffers of the first. Raises: KeyError when they differ in names."""
    parameters = dict(own.named_parameters())
    buffers = dict(own.named_buffers(remove_duplicate=False))  # rotary embeddings may have one under two names
    for name, parameter in other.named_parameters():
        parameter.data = parameters[name].data
    for name, buffer in other.named_buffers():
        buffer.data = buffers[name].data


def _facts(layer: Any) -> Iterator[tuple[object, ...]]:
    """Yield what makes a layer's kind: classes, shapes and simple attributes of its modules."""
    for path, module in layer.named_modules():
        yield path, type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, _SIMPLE) and not name.startswith("_") and not name.endswith(_NUMBERS):
                yield path, name, value
    for path, parameter in layer.named_parameters():
        yield path, tuple(parameter.shape)


class LazyMask:
    """A model's attention mask whose rows are made when they are used."""

    def __init__(self, **form: Any) -> None:
        """form: arguments of transformers' `eager_mask`."""
        self._form = form

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop as transformers' additive mask, [1, 1, stop - start, T]."""
        from transformers.masking_utils import eager_mask

        first = self._form.get("q_offset", 0) + start
        mask: Tensor = eager_mask(**{**self._form, "q_length": stop - start, "q_offset": first})
        return mask


def register() -> None:
    """Register the attention and its mask with transformers. It may be called several times."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, LazyMask)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return ([1, T, H, D], None). query: [1, H, T, D]."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    num_rows = max(1, _MAX_SCORES // (query.shape[1] * key.shape[2]))
    outputs = []
    for start in range(0, query.shape[2], num_rows):
        stop = min(start + num_rows, query.shape[2])
        mask: Any
        if isinstance(attention_mask, LazyMask):
            mask = attention_mask.rows(start, stop)
        else:
            mask = None if attention_mask is None else attention_mask[..., start:stop, :]
        outputs.append(eager(module, query[:, :, start:stop], key, value, mask, *args, **options)[0])
    return torch.cat(outputs, 1), None
