"""The learner's forward and backward pass on the device against the CPU's in float32."""

from typing import Any

from tests.gpu.finding import Finding, Machine, Part

_LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
_NEEDS = ("torch", "transformers", "numpy", "msgspec", "pydantic", "pydantic_settings")
_LENGTHS = [40, 33, 20, 7, 2]


def show(machine: Machine) -> Finding:
    """Every loss in float32 and bfloat16: logprobs in nats, gradients relative to their norm."""
    import torch

    from tests.gpu.models import TINY, copied, random_model

    model = random_model(TINY, "cpu", torch.float32)
    exact = _pass(model, "cpu")
    figures: dict[str, float] = {}
    holds = True
    for name, limit in _LIMITS.items():
        ours = _pass(copied(model, machine.device, getattr(torch, name), TINY), machine.device)
        figures[f"{name}_logprob_difference_nats"] = float((ours[0] - exact[0]).abs().max())
        figures[f"{name}_gradient_relative_difference"] = float((ours[1] - exact[1]).norm() / exact[1].norm())
        figures[f"{name}_limit"] = limit
        holds &= figures[f"{name}_logprob_difference_nats"] <= limit
        holds &= figures[f"{name}_gradient_relative_difference"] <= (limit if name == "float32" else 2 * limit)
    return Finding("logprobs, and the gradient of the clipped loss", holds, figures)


def _pass(model: Any, device: str) -> tuple[Any, Any]:
    """Return (logprobs [K], the whole gradient, flat), float32 on the CPU."""
    import torch

    from learner.models.gradient import add_gradient, score_tokens
    from learner.objectives.policy_gradient import make_loss
    from protocol.settings.settings import Settings
    from tests.fakes.engines import PlainEngine
    from tests.gpu.models import TINY, trajectories

    engine = PlainEngine(model, torch.device(device))
    micro_batch = trajectories(_LENGTHS, TINY.vocabulary)
    with torch.no_grad():
        logprobs, _ = score_tokens(engine, micro_batch.to(engine.device), 1.0, with_entropy=False)
    add_gradient(engine, [micro_batch], make_loss(Settings()), 1.0, temperature=1.0, with_entropy=True)
    gradient = torch.cat([parameter.grad.reshape(-1).float().cpu() for parameter in model.parameters()])
    return logprobs.float().cpu(), gradient


def show_deepspeed(machine: Machine) -> Finding:
    """One rank's whole optimizer step in DeepSpeed: the loss falls on the same micro-batch, nothing was refused."""
    import tempfile
    from pathlib import Path

    import torch

    from learner.models.policy import PolicyEngine
    from learner.models.world import join_world
    from learner.objectives.supervised import weighted_nll
    from tests.fakes.policy_settings import small_policy_settings
    from tests.fakes.ports import free_port
    from tests.gpu.models import TINY, random_model, trajectories

    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        random_model(TINY, "cpu", torch.float32).save_pretrained(folder)
        join_world(0, 1, "127.0.0.1", free_port(), 60.0, None)
        micro_batch = trajectories(_LENGTHS, TINY.vocabulary)
        for stage in (0, 2, 3):
            settings = small_policy_settings(
                Path(folder),
                dtype="float32" if machine.device == "cpu" else "bfloat16",
                zero_stage=stage,
                lr=1e-2,
            )
            engine = PolicyEngine(settings)
            results = [engine.step([micro_batch], weighted_nll, float(micro_batch.num_model_tokens)) for _ in range(8)]
            if engine.device.type != machine.device:
                return Finding(f"the engine stands on {engine.device}", holds=False)
            figures[f"zero{stage}_loss_first"] = results[0].loss
            figures[f"zero{stage}_loss_last"] = results[-1].loss
            figures[f"zero{stage}_refused"] = sum(not result.applied for result in results)
    holds = all(
        figures[f"zero{stage}_refused"] == 0 and figures[f"zero{stage}_loss_last"] < figures[f"zero{stage}_loss_first"]
        for stage in (0, 2, 3)
    )
    return Finding("eight steps on one micro-batch, ZeRO 0, 2 and 3", holds, figures)


STEP = Part("learner_step", "the device's step is the CPU's in float32", _NEEDS, 1, show)
DEEPSPEED_STEP = Part("deepspeed_step", "DeepSpeed steps on the device", (*_NEEDS, "deepspeed"), 1, show_deepspeed)
