"""Logprobs through the head against the formula in float64: values, gradients, and what they hold of memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learner.models.scoring.head_logprobs import HeadForm, head_logprobs
from tests.learner.plan.measured_ranks import tracked

K, H, V = 9, 6, 37
# All at once; chunks of tokens and of vocabulary entries that do not divide; a number at a time.
NUMBERS = (1 << 22, 2 * V, 7, 1)
FORMS = (HeadForm(), HeadForm(0.7), HeadForm(0.7, scale=0.3, softcap=5.0), HeadForm(scale=2.0))


def inputs(has_bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    bias = torch.randn(V).requires_grad_() if has_bias else None
    return torch.randn(K, H).requires_grad_(), torch.randn(V, H).requires_grad_(), bias, torch.randint(0, V, (K,))


def slowly(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: HeadForm) -> Tensor:
    """Return log_softmax of the logits, [K, V]."""
    logits = linear(hidden, weight, bias) * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    return (logits / form.temperature).log_softmax(-1)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logprobs_entropies_and_gradients_are_those_of_all_logits(form: HeadForm, has_bias: bool, numbers: int) -> None:
    hidden, weight, bias, targets = inputs(has_bias)
    by_token = torch.randn(K)
    scores = head_logprobs(hidden, weight, bias, targets, form, chunk_numbers=numbers)
    (scores[:, 0] * by_token).sum().backward()

    ours = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    of_all = slowly(exact[0], exact[1], exact[2] if has_bias else None, form)
    logprobs = of_all.gather(1, targets[:, None])[:, 0]
    (logprobs * by_token).sum().backward()
    torch.testing.assert_close(scores[:, 0].double(), logprobs, rtol=0, atol=5e-6)
    torch.testing.assert_close(scores[:, 1].double(), -(of_all.exp() * of_all).sum(-1), rtol=0, atol=5e-6)
    for mine, reference in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=1e-5, atol=5e-6)


def test_frozen_head_gets_no_gradient_and_hidden_states_get_theirs() -> None:
    hidden, weight, _, targets = inputs(False)
    head_logprobs(hidden, weight, None, targets, HeadForm())[:, 0].sum().backward()
    with_weight, hidden.grad = hidden.grad, None
    head_logprobs(hidden, weight.detach(), None, targets, HeadForm())[:, 0].sum().backward()
    assert with_weight is not None
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, with_weight)


def test_no_tokens_give_nothing_and_gradients_of_zero() -> None:
    hidden, weight, bias, _ = inputs(True)
    nothing = torch.zeros(0, dtype=torch.long)
    scores = head_logprobs(hidden[:0], weight, bias, nothing, HeadForm())
    scores.sum().backward()
    assert scores.shape == (0, 2)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_entropy_is_zeros_when_it_is_not_wanted() -> None:
    hidden, weight, _, targets = inputs(False)
    assert not head_logprobs(hidden, weight, None, targets, HeadForm(), with_entropy=False)[:, 1].any()


def test_gradients_have_the_types_of_their_tensors() -> None:
    hidden, weight, bias, targets = inputs(True)
    assert bias is not None
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight, bias)]
    head_logprobs(low[0], low[1], low[2], targets, HeadForm())[:, 0].sum().backward()
    assert [tensor.grad.dtype for tensor in low if tensor.grad is not None] == [torch.bfloat16] * 3


def test_memory_is_a_few_chunks_and_no_logits_of_all_tokens() -> None:
    """In float32 all logits would be 655 MB, and their gradient as much again."""
    hidden, weight = (torch.zeros(n, 16, requires_grad=True) for n in (4096, 40000))
    with tracked() as found:
        head_logprobs(hidden, weight, None, torch.zeros(4096, dtype=torch.long), HeadForm())[:, 0].sum().backward()
    assert 4 * (1 << 22) < found.peak < 100e6


class BytesMoved(TorchDispatchMode):
    """Counts the bytes that kernels read and write, each tensor once a kernel; numbers at given places are left out."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and not any(part in function.name() for part in ("empty", "gather", "scatter")):
            read = {id(each): each for each in tree_leaves(args) if isinstance(each, Tensor)}
            written = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            self.number += sum(each.numel() * each.element_size() for each in [*read.values(), *written])
        return result


@pytest.mark.parametrize(
    ("h", "v", "with_entropy", "most"),
    [  # Qwen2.5 0.5B and 7B
        (896, 151936, True, 110.7 / 2),
        (896, 151936, False, 94.7 / 2),
        (3584, 152064, True, 124.8 / 2),
        (3584, 152064, False, 108.8 / 2),
    ],
)
def test_passes_over_the_logits_move_half_of_what_one_kernel_for_each_operation_would(
    h: int, v: int, with_entropy: bool, most: float
) -> None:
    k = 16384
    hidden, weight = (torch.empty(n, h, dtype=torch.bfloat16, device="meta").requires_grad_() for n in (k, v))
    targets = torch.empty(k, dtype=torch.int64, device="meta")
    with BytesMoved() as moved:
        form = HeadForm()
        head_logprobs(
            hidden, weight, None, targets, form, with_entropy=with_entropy, chunk_numbers=1 << 26
        ).sum().backward()
    assert most / 2 < moved.number / (k * v) < most
