"""A transformers model made ready for training: packed attention, nothing drawn at random, answers with logprobs.

Only rank 0's node needs the weights. Other ranks build the model from its small files, with weights that take no memory
until a broadcast writes them.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.disk.model_folder import stored_shapes
from learner.models import varlen_attention
from learner.models.gradient import RouterLoss
from learner.models.scoring.scored_model import make_scored
from learner.models.settings import PolicySettings
from learner.models.weights.lora import add_adapters
from learner.models.world import share, share_object
from protocol.errors import OperatorError
from protocol.value_heads import WRAPPERS, is_constant, is_head

# Words in a configuration's names of dropout and of a router's noise.
_RANDOM = ("drop", "jitter")
_OF_REWARDS = "are of a reward model (score.weight), which writes no text. Use a language model."
# Endings of a router's fixed bias in transformers' models. vLLM keeps it in float32.
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")


def load_model(settings: PolicySettings) -> Any:
    """Return the language model of settings.model_dir in training mode; other ranks' weights are unset.

    Collective where there are several ranks.
    """
    from transformers import AutoModelForCausalLM

    model = build_model(AutoModelForCausalLM, settings)
    if has_weights():
        _check_whole(model, settings)
    prepare_for_training(model, gradient_checkpointing=settings.gradient_checkpointing)
    if settings.lora is not None:
        add_adapters(model, settings.lora)
    make_scored(model)
    return model


def build_model(auto_class: Any, settings: PolicySettings) -> Any:
    """Return a model of settings.model_dir without dropout: with its weights on rank 0, with unset ones elsewhere.

    auto_class: of transformers. Buffers are set on every rank. Collective where there are several ranks.
    Raises: OperatorError when the ranks build different models.
    """
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    varlen_attention.register()
    config = AutoConfig.from_pretrained(settings.model_dir, trust_remote_code=settings.trust_remote_code)
    turn_off_dropout(config)
    fix_positions(config, settings.longest_text)
    if settings.router_aux_loss:
        config.output_router_logits = True
    form: dict[str, Any] = {
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": varlen_attention.NAME,
        "trust_remote_code": settings.trust_remote_code,
    }
    if has_weights():
        model = _read(auto_class, settings, config, form)
    else:
        with no_init_weights():
            model = auto_class.from_config(config, **form)
        model.tie_weights()
    _make_constants_buffers(model)
    if dist.is_initialized():
        _take_form_of_first(model)
        share([buffer for _, buffer in model.named_buffers()])
    return model


def _read(auto_class: Any, settings: PolicySettings, config: Any, form: dict[str, Any]) -> Any:
    """Return the model with the folder's weights. Raises: OperatorError when some are missing or of another shape."""
    wrapped = {f"^{prefix}": "" for prefix in WRAPPERS}
    with torch.device("meta"):
        described = auto_class.from_config(config, **form)
    _keep_router_biases(type(described))
    model, report = auto_class.from_pretrained(
        settings.model_dir,
        config=config,
        key_mapping=wrapped,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        **form,
    )
    where = f"The weights of the {settings.role} in {settings.model_dir}"
    if others := sorted((name, tuple(found), tuple(expected)) for name, found, expected in report["mismatched_keys"]):
        name, found, expected = others[0]
        raise OperatorError(
            f"{where} have another shape than config.json says in {len(others)} tensors, such as {name}: {found} in "
            f"the folder, expected {expected}. Correct config.json, or use a complete model folder."
        )
    if missing := sorted(report["missing_keys"]):
        if "score.weight" in report["unexpected_keys"]:  # it is in place of the output head
            raise OperatorError(f"{where} {_OF_REWARDS}")
        raise OperatorError(
            f"{where} lack {len(missing)} tensors of a {config.model_type} model, such as {missing[0]}. "
            "Use a complete model folder."
        )
    model.unused_tensors = tuple(report["unexpected_keys"])
    # transformers makes every parameter that it reads a trained one, such as the bias of some routers.
    for name, parameter in described.named_parameters():
        if not parameter.requires_grad:
            model.get_parameter(name).requires_grad_(False)
    return model


def _keep_router_biases(kind: Any) -> None:
    """Make transformers read router biases of this class in float32; some classes round them to the model's type.

    Biases of experts are close together: rounded to bfloat16, they send tokens to other experts than vLLM does.
    """
    kind._keep_in_fp32_modules_strict = {*(kind._keep_in_fp32_modules_strict or ()), *_ROUTER_BIASES}


def _make_constants_buffers(model: Any) -> None:
    """Make parameters without a gradient, such as the bias of some routers, buffers: only parameters are cast."""
    for name, parameter in list(model.named_parameters()):
        if not parameter.requires_grad:
            path, _, last = name.rpartition(".")
            owner = model.get_submodule(path)
            delattr(owner, last)
            owner.register_buffer(last, parameter.detach())


def _check_whole(model: Any, settings: PolicySettings) -> None:
    """Raise OperatorError for weights of the folder that the model would leave out."""
    where = f"The weights of the {settings.role} in {settings.model_dir}"
    shapes = dict(stored_shapes(settings.model_dir)) if unused_tensors(model) else {}
    known = {name for name in unused_tensors(model) if is_head(name) or is_constant(name, shapes.get(name))}
    if unused := sorted({*unused_tensors(model)} - known):
        raise OperatorError(
            f"{where} have {len(unused)} tensors that a {model.config.model_type} model of its config.json does not "
            f"use, such as {unused[0]}. Merge adapters into the model, or correct config.json."
        )
    if "score.weight" in unused_tensors(model):
        raise OperatorError(f"{where} {_OF_REWARDS}")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is not embedding.weight:
        raise OperatorError(
            f"{where} have an output head that differs from the embedding, and config.json ties them "
            "(tie_word_embeddings): other programs would use the embedding. Set it to false in config.json."
        )


def unused_tensors(model: Any) -> tuple[str, ...]:
    """Return the names of the folder's tensors that a model read by `build_model` does not use, on rank 0."""
    names: tuple[str, ...] = model.unused_tensors
    return names


def has_weights() -> bool:
    """Return whether this rank reads weights from the model folder."""
    return not dist.is_initialized() or dist.get_rank() == 0


def prepare_for_training(model: Any, *, gradient_checkpointing: bool) -> Any:
    """Return the model in training mode, which gradient checkpointing needs, without dropout."""
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    return model


def _take_form_of_first(model: Any) -> None:
    """Give every tensor the type that it has on rank 0: some models keep a few in float32."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    first = share_object(own)
    for name in first.keys() | own.keys():
        if name not in own or name not in first or own[name][1] != first[name][1]:
            raise OperatorError(
                f"This node's model differs from rank 0's: {name} is {own.get(name, 'missing')} here and "
                f"{first.get(name, 'missing')} there. Use the same transformers on all nodes."
            )
        if own[name] != first[name]:
            tensors[name].data = torch.empty(first[name][1], dtype=first[name][0])


def turn_off_dropout(config: Any) -> None:
    """Set every dropout and jitter in a model's configuration to 0, also in its parts.

    Otherwise a fresh trajectory's ratio would differ from 1. Some models call dropout as a function, so changing their
    modules is not enough.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and value and any(word in name for word in _RANDOM):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            turn_off_dropout(value)


def fix_positions(config: Any, longest_text: int) -> None:
    """Give all texts of a run the same factors of LongRoPE, as vLLM does: the long ones if the longest text needs them.

    Otherwise transformers chooses them by the longest text of each micro-batch.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        is_long = longest_text > rope["original_max_position_embeddings"]
        rope["short_factor"] = rope["long_factor"] = rope["long_factor" if is_long else "short_factor"]


def router_loss_of(model: Any, weight: float) -> RouterLoss:
    """Return the model's own loss that balances its experts. weight: learner.router_aux_loss.

    Raises: OperatorError for a model without one.
    """
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    num_experts, num_chosen = (getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok"))
    if function is None or num_experts is None or num_chosen is None:
        raise OperatorError(
            f"learner.router_aux_loss = {weight} needs a mixture of experts with such a loss, "
            f"and {model.config.model_type} has none. Set learner.router_aux_loss to 0."
        )

    def loss(layers: Sequence[Tensor]) -> Tensor:
        value: Tensor = function(tuple(layers), num_experts, num_chosen)
        return value

    return loss
