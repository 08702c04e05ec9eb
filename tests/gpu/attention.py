"""Packed attention against attention over each trajectory alone."""

from typing import Any

from tests.gpu.finding import Finding, Machine, Part

_LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}


def show(machine: Machine) -> Finding:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from learner.models.varlen_attention import Segments, varlen_attention

    lengths = (65, 64, 40, 17, 1) if machine.is_short else (1500, 1111, 700, 257, 128, 33, 2, 1)
    heads, kv_heads, size = 8, 2, 64
    figures: dict[str, float] = {}
    for name, limit in _LIMITS.items():
        generator = torch.Generator(machine.device).manual_seed(0)
        whole = [
            torch.randn(
                (1, number, sum(lengths), size), generator=generator, device=machine.device, dtype=getattr(torch, name)
            ).requires_grad_()
            for number in (heads, kv_heads, kv_heads)
        ]
        packed, _ = varlen_attention(
            torch.nn.Module(), whole[0], whole[1], whole[2], None, segments=Segments(lengths, whole[0].device)
        )
        weight = torch.randn(packed.shape, generator=generator, device=machine.device, dtype=packed.dtype)
        ours = torch.autograd.grad((packed * weight).float().sum(), whole)
        exact = [tensor.detach().double().requires_grad_() for tensor in whole]
        alone = torch.cat(
            [
                scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)
                for parts in zip(*(torch.split(tensor, lengths, dim=2) for tensor in exact), strict=True)
            ],
            dim=1,
        )
        theirs = torch.autograd.grad((alone * weight.double()).sum(), exact)
        difference = max(_relative(a, b) for a, b in zip((packed, *ours), (alone, *theirs), strict=True))
        figures[f"{name}_relative_difference"] = difference
        figures[f"{name}_limit"] = limit
    holds = all(figures[f"{name}_relative_difference"] <= limit for name, limit in _LIMITS.items())
    return Finding("outputs and gradients, against float64", holds, figures)


def _relative(ours: Any, exact: Any) -> float:
    """Return the norm of the difference over the norm of what is exact."""
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


ATTENTION = Part("attention", "packed attention is that of each trajectory alone", ("torch",), 1, show)
