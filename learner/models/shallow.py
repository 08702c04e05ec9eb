"""A model's first layers, in float32 with random weights: small enough to compute a long text twice on one device.

Windows, chunks, caps, positions and experts come from the model's own configuration. Depth adds nothing to them: the
first layers contain each kind of layer that the model has.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch

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
