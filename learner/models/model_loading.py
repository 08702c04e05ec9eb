"""A transformers model made ready for training: packed attention, nothing drawn at random, answers with logprobs."""

from typing import Any

import torch

from learner.models import varlen_attention
from learner.models.scoring.scored_model import make_scored
from learner.models.settings import PolicySettings
from learner.models.weights.lora import add_adapters
from protocol.errors import OperatorError

# What a model's configuration calls the chance of dropping something, and the noise on a router's choice.
_RANDOM = ("drop", "jitter")


def load_model(settings: PolicySettings) -> Any:
    """Return the model of settings.model_dir in training mode (gradient checkpointing needs it), without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    varlen_attention.register()
    config = AutoConfig.from_pretrained(settings.model_dir, trust_remote_code=settings.trust_remote_code)
    turn_off_dropout(config)
    if settings.router_aux_loss:
        _ask_for_router_loss(config, settings)
    model = AutoModelForCausalLM.from_pretrained(
        settings.model_dir,
        config=config,
        dtype=getattr(torch, settings.dtype),
        attn_implementation=varlen_attention.NAME,
        trust_remote_code=settings.trust_remote_code,
    )
    prepare_for_training(model, gradient_checkpointing=settings.gradient_checkpointing)
    if settings.lora is not None:
        add_adapters(model, settings.lora)
    make_scored(model, float32_head=settings.float32_head)
    return model


def prepare_for_training(model: Any, *, gradient_checkpointing: bool) -> Any:
    """Return the model in training mode, which gradient checkpointing needs, without dropout."""
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    return model


def turn_off_dropout(config: Any) -> None:
    """Set every dropout and jitter of a model's configuration to 0, those of its parts too.

    A fresh trajectory's ratio would differ from 1 otherwise. Models read theirs when they are built, and some call
    functions with it, where no module shows it.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and value and any(word in name for word in _RANDOM):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            turn_off_dropout(value)


def _ask_for_router_loss(config: Any, settings: PolicySettings) -> None:
    """Have the model give the loss that balances its experts with every output. Raises: OperatorError without one."""
    if not hasattr(config, "output_router_logits"):
        raise OperatorError(
            f"learner.router_aux_loss = {settings.router_aux_loss} is for mixtures of experts whose code has such a "
            f"loss, and a {config.model_type} has none. Set learner.router_aux_loss to 0."
        )
    config.output_router_logits = True
