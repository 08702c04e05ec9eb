"""Memory and speed of forward and backward passes over packed trajectories, at the sizes of published models."""

from tests.gpu.finding import Finding, Machine, Part, seconds_of
from tests.gpu.learner_step import _NEEDS

_TOKENS = 16_384


def show(machine: Machine) -> Finding:
    """Random weights, no optimizer. MFU counts 6 FLOPs for each weight and token, attention left out."""
    import torch

    from learner.models.gradient import add_gradient
    from learner.objectives.supervised import weighted_nll
    from learner.rank.mfu import peak_flops
    from tests.fakes.engines import PlainEngine
    from tests.gpu.models import SHAPES, TINY, random_model, trajectories

    is_gpu = machine.device == "cuda"
    shapes = SHAPES if is_gpu and not machine.is_short else {"tiny": TINY}
    tokens = _TOKENS if is_gpu else 512
    card = torch.cuda.get_device_name(0) if is_gpu else ""
    peak = peak_flops(card, "bfloat16")
    figures: dict[str, float] = {}
    for name, shape in shapes.items():
        model = random_model(shape, machine.device, torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = PlainEngine(model, torch.device(machine.device))
        micro_batch = trajectories([tokens // 4, tokens // 4, *[tokens // 32] * 16], shape.vocabulary)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()

        def work(engine: PlainEngine = engine, micro_batch: object = micro_batch) -> None:
            add_gradient(engine, [micro_batch], weighted_nll, 1.0, temperature=1.0, with_entropy=False)  # type: ignore[list-item]

        taken = min(seconds_of(work, machine.device, times=3))
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        figures[f"{name}_tokens_per_s"] = tokens / taken
        if peak is not None:
            figures[f"{name}_mfu"] = 6.0 * num_weights * tokens / taken / peak
        if is_gpu:
            figures[f"{name}_peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
            figures[f"{name}_weights_and_gradients_GB"] = 4.0 * num_weights / 1e9
        del model, engine, work
        if is_gpu:
            torch.cuda.empty_cache()
    return Finding(f"{tokens} tokens a pass, bfloat16, gradient checkpointing", True, figures)


SPEED = Part("speed", "packed passes run", _NEEDS, 1, show)
