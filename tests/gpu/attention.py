"""Packed attention against attention over each trajectory alone, also where trajectories share a prompt."""

from typing import Any

from tests.gpu.finding import Finding, Machine, Part

_LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}


# Head size of queries and keys, of values, and the sliding window: usual, multi-head latent, windowed.
_FORMS = {"": (64, 64, None), "latent_": (192, 128, None), "window_": (64, 64, 48)}


def show(machine: Machine) -> Finding:
    import torch

    lengths = (65, 64, 40, 17, 1) if machine.is_short else (1500, 1111, 700, 257, 128, 33, 2, 1)
    figures: dict[str, float] = {}
    for form, (size, value_size, window) in _FORMS.items():
        for name in _LIMITS:
            shapes = [(1, heads, sum(lengths), each) for heads, each in ((8, size), (2, size), (2, value_size))]
            for shared, prompts in (("", ()), ("shared_", _prompts(lengths))):
                given = (machine.device, getattr(torch, name), shapes, lengths, prompts, window)
                figures[f"{form}{shared}{name}_relative_difference"] = _difference(*given)
    holds = all(value <= _LIMITS["bfloat16" if "bfloat16" in name else "float32"] for name, value in figures.items())
    return Finding(f"outputs and gradients, against float64; limits {_LIMITS}", holds, figures)


def _prompts(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return half of the first text as the prompt of all texts but the first two."""
    return ((0, 0), (0, 0), *((0, lengths[0] // 2),) * (len(lengths) - 2))


def _difference(
    device: str,
    dtype: Any,
    shapes: list[Any],
    lengths: tuple[int, ...],
    prompts: tuple[tuple[int, int], ...],
    window: int | None,
) -> float:
    """Return the largest relative difference of packed attention and its gradients from each text alone."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from learner.models.varlen_attention import Segments, varlen_attention

    draw = torch.Generator(device).manual_seed(0)
    whole = [torch.randn(shape, generator=draw, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    segments = Segments(lengths, whole[0].device, prompts)
    packed, _ = varlen_attention(torch.nn.Module(), *whole, None, segments=segments, sliding_window=window)
    weight = torch.randn(packed.shape, generator=draw, device=device, dtype=packed.dtype)
    ours = torch.autograd.grad((packed * weight).float().sum(), whole)
    exact = [tensor.detach().double().requires_grad_() for tensor in whole]
    parts = []
    beside = zip(
        *(torch.split(tensor, lengths, dim=2) for tensor in exact), prompts or ((0, 0),) * len(lengths), strict=True
    )
    for q, own_k, own_v, (start, number) in beside:
        before = [tensor[:, :, start : start + number] for tensor in exact[1:]]
        k, v = (torch.cat(pair, dim=2) for pair in zip(before, (own_k, own_v), strict=True))
        places = torch.arange(k.shape[2], device=device)
        distance = places[number:, None] - places
        mask = (distance >= 0) & (distance < (window or len(places)))
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2))
    alone = torch.cat(parts, dim=1)
    theirs = torch.autograd.grad((alone * weight.double()).sum(), exact)
    return max(_relative(a, b) for a, b in zip((packed, *ours), (alone, *theirs), strict=True))


def _relative(ours: Any, exact: Any) -> float:
    """Return the norm of the difference over the norm of what is exact."""
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


ATTENTION = Part("attention", "packed attention is that of each trajectory alone", ("torch",), 1, show)
