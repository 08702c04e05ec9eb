"""The learner's step, probe and packing of a push on a device that this machine does not have.

    python pretended_device.py

Torch's fake tensors know shapes, types and devices and hold no numbers: every operation between two devices raises, as
it would on a GPU. The device is one of Python's own making, since the backward pass on a pretended "cuda" needs a build
of torch that knows CUDA. In a process of its own: the device is torch's from then on. Prints what each case gave, as
JSON: the device that its result is on, or the error's name.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from learner.models import varlen_attention
from learner.models.gradient import add_gradient
from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.policy import PolicyEngine
from learner.models.scoring.scored_model import make_scored
from learner.objectives.policy_gradient import make_loss
from learner.objectives.supervised import weighted_nll
from learner.weights.feed import BucketMemory, pack
from protocol.settings.settings import IS_SAVED, Settings
from protocol.weights.wire import TensorMeta
from tests.fakes.engines import PlainEngine
from tests.fakes.planned_weights import plan_buckets

NAME = "pretended"


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    device = torch.device(NAME, 0)
    with FakeTensorMode():
        engine = PlainEngine(tiny_model(device), device)
        found = {name: outcome(lambda case=case: case(engine)) for name, case in cases().items()}  # type: ignore[misc]
    print(json.dumps(found))


def cases() -> dict[str, Callable[[PlainEngine], Tensor]]:
    made: dict[str, Callable[[PlainEngine], Tensor]] = {
        "supervised": lambda engine: step(engine, weighted_nll),
        "probe": probe,
        "push": push,
        "a loss that keeps a tensor on the CPU": lambda engine: step(
            engine, lambda logprobs, entropies, micro_batch: ((logprobs * samples_weights()).sum(), {})
        ),
    }
    for i, loss in enumerate(("ppo", "gspo", "cispo", "reinforce")):
        for j, correction in enumerate(("none", "tis", "icepop", "geo_mask")):
            # Every two of the three choices meet; all three would be twice as many cases.
            old = ("behaviour", "recompute")[(i + j) % 2]
            settings = Settings.model_validate(
                {"learner": {"loss": loss, "correction": correction}, "policy": {"old_logprobs": old}},
                context={IS_SAVED: True},  # a run refuses some of them
            )
            made[f"{loss} {correction} {old}"] = lambda engine, settings=settings: step(engine, make_loss(settings))
    return made


def step(engine: PlainEngine, loss: Any) -> Tensor:
    """Return the summed loss of two micro-batches, after their gradient was added.

    None without tokens: fake tensors keep the value of up to one number, and cannot move it to a pretended device.
    """
    parts = [make_micro_batch(samples()), make_micro_batch(samples()[1:])]
    sums = add_gradient(engine, parts, loss, 0.5, temperature=0.7, with_entropy=True)
    assert {value.device for value in sums.values()} == {engine.device}
    gradient = next(engine.model.parameters()).grad
    assert gradient is not None
    assert gradient.device == engine.device
    return sums["loss"]


def probe(engine: PlainEngine) -> Tensor:
    policy = object.__new__(PolicyEngine)  # without DeepSpeed, which has no such device
    policy._engine, policy.device = engine, engine.device  # type: ignore[assignment]
    return policy.logprobs(make_micro_batch(samples()), temperature=1.0)


def push(engine: PlainEngine) -> Tensor:
    """Return the last bucket of a push, packed on the device."""
    weights = list(engine.model.named_parameters())
    plan = plan_buckets([TensorMeta(name, "float32", tuple(weight.shape)) for name, weight in weights], 20_000)
    buckets = [[(meta.name, dict(weights)[meta.name]) for meta in bucket] for bucket in plan]
    return list(pack(plan, iter(buckets), BucketMemory(plan, str(engine.device))))[-1]


def samples() -> list[LearnerSample]:
    return [
        LearnerSample(
            np.arange(length, dtype=np.int32),
            np.array([False] + [True] * (length - 1)),
            np.zeros(length, np.float32),
            1.0,
        )
        for length in (9, 8, 3)
    ]


def samples_weights() -> Tensor:
    return make_micro_batch(samples()).weights


def tiny_model(device: torch.device) -> Any:
    """Return a tiny Qwen2 whose parameters and buffers pretend to be on the device."""
    from transformers import Qwen2ForCausalLM

    from tests.fakes.tiny_models import tiny_config

    varlen_attention.register()
    form = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(tiny_config(**form, attn_implementation=varlen_attention.NAME))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(torch.zeros(parameter.shape, device=device))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, device=device)
    make_scored(model)
    return model


def outcome(case: Callable[[], Tensor]) -> str:
    try:
        return str(case().device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
