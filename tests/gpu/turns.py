"""A model, its gradients and its optimizer moved off a device and back, as a rank does that shares it with a server."""

import math
import time

from tests.gpu.finding import Finding, Machine, Part


def show(machine: Machine) -> Finding:
    import torch

    from learner.models.parked import ParkedModels

    torch.manual_seed(0)
    width = 256 if machine.is_short or machine.device == "cpu" else 8192
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4))).to(machine.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(8, width, device=machine.device)

    def step() -> float:
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    losses = [step(), step()]
    expected = [parameter.detach().clone().cpu() for parameter in model.parameters()]
    parked = ParkedModels([model, optimizer], torch.device(machine.device))
    started = time.perf_counter()
    parked.park()
    away_s, away = time.perf_counter() - started, parked.num_bytes
    left = torch.cuda.memory_allocated() if machine.device == "cuda" else 0
    started = time.perf_counter()
    parked.restore()
    back_s = time.perf_counter() - started
    are_equal = all(
        torch.equal(found.detach().cpu(), before) for found, before in zip(model.parameters(), expected, strict=True)
    )
    losses.append(step())
    state = 4 * 4 * sum(parameter.numel() for parameter in model.parameters())  # weights, gradients, two moments
    holds = are_equal and away >= state and left < state // 50 and math.isfinite(losses[2])
    figures = {"away_GB": away / 1e9, "left_GB": left / 1e9, "away_s": away_s, "back_s": back_s}
    return Finding(f"{away >> 20} MiB went and came back" + ("" if are_equal else " and DIFFER"), holds, figures)


TURNS = Part("turns", "a model leaves the device to a server and comes back whole", ("torch",), 1, show)
