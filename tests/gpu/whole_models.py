"""Models in DeepSpeed on a device: rounding in bfloat16, LoRA parked, and what ZeRO 3's start puts there; FA4."""

import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.finding import Finding, Machine, Part, seconds_of, unchecked
from tests.gpu.learner_step import _NEEDS


def show_noise(machine: Machine) -> Finding:
    """The probe's limits against bfloat16 and float32 of one deep random model, whose logits have a deviation of 3."""
    import numpy as np
    import torch

    from learner.models.gradient import score_tokens
    from learner.rank.push import _TAIL_TOLERANCES, _TOLERANCE
    from tests.fakes.engines import PlainEngine
    from tests.gpu.models import TINY, Shape, copied, random_model, trajectories

    shape = TINY if machine.is_short else Shape(1024, 28, 16, 4, 3072, 32_000, False)
    exact = random_model(shape, machine.device, torch.float32)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    scores = []
    for model in (exact, copied(exact, machine.device, torch.bfloat16, shape)):
        engine = PlainEngine(model, torch.device(machine.device))
        with torch.no_grad():
            batch = trajectories([272], shape.vocabulary).to(engine.device)
            scores.append(score_tokens(engine, batch, 1.0, with_entropy=False)[0].float().cpu().numpy())
    median, tail, largest = np.quantile(np.abs(scores[0] - scores[1]), (0.5, 0.95, 1.0))
    limit = _TOLERANCE["bfloat16"]
    figures = {"median_nats": float(median), "tail_nats": float(tail), "largest_nats": float(largest)}
    return Finding("bfloat16 against float32", median <= limit and tail <= _TAIL_TOLERANCES * limit, figures)


def show_lora_turns(machine: Machine) -> Finding:
    """A LoRA policy in DeepSpeed leaves the device and steps on after its return."""
    from learner.models.parked import ParkedModels

    left, steps = 0, []
    with tempfile.TemporaryDirectory() as folder:
        policy, step = _policy(machine, folder, lora=True, zero_stage=2)
        steps.append(step())
        parked = ParkedModels([policy], policy.device)
        parked.park()
        away = parked.num_bytes
        storages = [parameter.untyped_storage() for parameter in policy._model.parameters()]
        left = sum(storage.nbytes() for storage in storages if storage.resizable())  # a CPU's may lie in their file
        parked.restore()
        steps.append(step())
    holds = left == 0 and away > 0 and all(steps)
    return Finding(f"{away} bytes went, {left} stayed", holds, {"left_bytes": left})


def show_zero3_start(machine: Machine) -> Finding:
    """With weights in host memory, the start of ZeRO 3 never has the whole model on the device."""
    import torch

    if machine.device != "cuda":
        return unchecked("a CPU's own memory is not counted")
    from tests.gpu.models import TINY, Shape

    shape = TINY if machine.is_short else Shape(2048, 24, 16, 4, 8192, 32_000, False)
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        policy, _ = _policy(machine, folder, shape=shape, zero_stage=3, offload="all")
        peak = torch.cuda.max_memory_allocated() - before
        whole = 2 * sum(policy._shards.whole_numel(each) for each in policy._model.parameters())
    figures = {"peak_GB": peak / 1e9, "model_GB": whole / 1e9}
    return Finding("start with offload all", machine.is_short or peak < whole // 2, figures)


def _policy(machine: Machine, folder: str, *, shape: Any = None, lora: bool = False, **changes: Any) -> Any:
    """Return (a policy of one rank, a function that takes a step and returns whether it was applied)."""
    import torch
    import torch.distributed as dist

    from learner.models.policy import PolicyEngine
    from learner.models.weights.lora import LoraForm
    from learner.models.world import join_world
    from learner.objectives.supervised import weighted_nll
    from tests.fakes.policy_settings import small_policy_settings
    from tests.fakes.ports import free_port
    from tests.gpu.models import TINY, random_model, trajectories

    shape = shape or TINY
    dtype: Any = "float32" if machine.device == "cpu" else "bfloat16"
    random_model(shape, machine.device, getattr(torch, dtype)).save_pretrained(folder)
    if not dist.is_initialized():
        join_world(0, 1, "127.0.0.1", free_port(), 60.0, None)
    form = LoraForm(4, 8.0, ("q_proj", "down_proj")) if lora else None
    policy = PolicyEngine(small_policy_settings(Path(folder), dtype=dtype, lora=form, **changes))
    batch = trajectories([40, 33], shape.vocabulary)
    return policy, lambda: policy.step([batch], weighted_nll, float(batch.num_model_tokens)).applied


def show_flash4(machine: Machine) -> Finding:
    """The same packed attention by FlashAttention 4, where the installed torch has it."""
    import torch
    from torch.nn import attention

    from learner.models.varlen_attention import Segments, varlen_attention

    listed = getattr(attention, "list_flash_attention_impls", list)()
    if machine.device != "cuda" or "FA4" not in listed:
        return unchecked(f"torch {torch.__version__} offers {', '.join(listed) or 'no other implementation'} here")
    lengths = (2048,) * 8
    parts = [torch.randn(1, n, sum(lengths), 128, device="cuda", dtype=torch.bfloat16) for n in (28, 4, 4)]
    segments = Segments(lengths, parts[0].device)

    def work() -> Any:
        return varlen_attention(torch.nn.Module(), *parts, None, segments=segments)[0]

    second, second_s = work(), min(seconds_of(work, "cuda"))
    try:
        attention.activate_flash_attention_impl("FA4")
    except (ImportError, RuntimeError) as error:
        return unchecked(f"it does not start: {error}")
    try:
        fourth, fourth_s = work(), min(seconds_of(work, "cuda"))
    finally:
        attention.restore_flash_attention_impl()
    difference = float((second.float() - fourth.float()).norm() / second.float().norm())
    figures = {"relative_difference": difference, "times_as_fast": second_s / fourth_s}
    return Finding("FA4 against FA2, forward", difference < 2e-2, figures)


NOISE = Part("noise", "bfloat16 passes the probe's limits", _NEEDS, 1, show_noise)
LORA_TURNS = Part(
    "lora_turns", "adapters and their base leave the device", (*_NEEDS, "deepspeed", "peft"), 1, show_lora_turns
)
ZERO3_START = Part("zero3_start", "no device holds the model whole", (*_NEEDS, "deepspeed"), 1, show_zero3_start)
FLASH4 = Part("flash4", "FlashAttention 4 computes the same", ("torch",), 1, show_flash4)
