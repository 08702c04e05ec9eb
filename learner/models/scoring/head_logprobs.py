"""Log-probabilities of given tokens, and entropies, from hidden states through the LM head, without all logits.

Shapes: K tokens, H hidden size, V vocabulary, C tokens of a chunk, U vocabulary entries of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# Logits that exist at once, in float32: 16 MiB fit a CPU's cache. They are recomputed in the backward pass.
CHUNK_NUMBERS = 1 << 22
# GPUs want larger matrix products: 256 MiB.
CHUNK_NUMBERS_ON_GPU = 1 << 26
# Vocabulary entries of one chunk; the gradient of these rows of the head is summed in float32.
_CHUNK_ENTRIES = 8192


@dataclass(frozen=True)
class HeadForm:
    """The formula of logits: softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) / temperature."""

    temperature: float = 1.0
    scale: float = 1.0  # factor of the model, applied before the softcap
    softcap: float | None = None  # largest absolute logit; None: none


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    form: HeadForm,
    *,
    with_entropy: bool = True,
    chunk_numbers: int | None = None,
) -> Tensor:
    """Return [K, 2] float32: logprobs of targets, and entropies of their distributions; natural logs.

    hidden: [K, H]. weight: [V, H]. bias: [V] or None. targets: [K] int64. Softmax and sums over it are float32. Only
    logprobs carry a gradient. with_entropy: False gives zeros and saves their work.
    Memory: a few times [C, U] in float32, C * U at most chunk_numbers; in the backward pass the gradients of hidden
    and weight, and hidden twice more. Time: passes over [C, U], so each fuses what one kernel can do.
    Source: the running maximum and sum of online softmax, arXiv:1805.02867.
    """
    if chunk_numbers is None:
        chunk_numbers = CHUNK_NUMBERS_ON_GPU if hidden.is_cuda else CHUNK_NUMBERS
    return _apply(hidden, weight, bias, targets, form, with_entropy, chunk_numbers)


class _HeadLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: HeadForm,
        with_entropy: bool,
        chunk_numbers: int,
    ) -> Tensor:
        scores = torch.empty(len(targets), 2, dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        chunks = _Chunks(hidden, weight, bias, targets, form, chunk_numbers)
        for tokens in chunks.of_tokens():
            softmax = _OnlineSoftmax(tokens.stop - tokens.start, hidden.device, with_entropy)
            for entries in chunks.of_entries():
                products, factor = chunks.logits(tokens, entries, weight[entries])
                softmax.add(products, factor, *chunks.target_columns(tokens, entries))
            scores[tokens], log_sums[tokens] = softmax.scores(), softmax.log_sums()
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums)
        ctx.form, ctx.chunk_numbers = form, chunk_numbers
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums = ctx.saved_tensors
        chunks = _Chunks(hidden, weight, bias, targets, ctx.form, ctx.chunk_numbers)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        by_token = grads[0][:, :1] * (ctx.form.scale / ctx.form.temperature)  # entropies carry none
        # A gradient's size is added to the exponents of softmax, and its sign goes to what it is multiplied with.
        sign = by_token.sign().neg_()
        signed = hidden * sign.to(hidden.dtype)
        for entries in chunks.of_entries():
            rows = weight[entries]
            row_grads: Tensor | None = None
            for tokens in chunks.of_tokens():
                grad = chunks.logit_gradient(tokens, entries, rows, by_token[tokens].abs(), log_sums[tokens])
                if of_bias is not None:
                    of_bias[entries] += sign[tokens, 0] @ grad.float()
                if of_hidden is not None:
                    _add_product(of_hidden[tokens], grad, rows)
                if wants_weight:
                    row_grads = _add_product(row_grads, grad.T, signed[tokens])
            if of_weight is not None:
                of_weight[entries] = 0.0 if row_grads is None else row_grads
        if of_hidden is not None:
            of_hidden *= sign
        found = (of_hidden, of_weight, of_bias)
        typed = [None if g is None else g.to(x.dtype) for g, x in zip(found, (hidden, weight, bias), strict=True)]
        return *typed, None, None, None, None


class _Chunks:
    """The head's logits, a chunk of tokens by a chunk of vocabulary entries at a time."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: HeadForm, numbers: int
    ) -> None:
        self._hidden, self._weight, self._bias, self._targets = hidden, weight, bias, targets
        self._form = form
        self._num_entries = min(_CHUNK_ENTRIES, len(weight), numbers)
        self._num_tokens = max(1, numbers // self._num_entries)

    def of_tokens(self) -> Iterator[slice]:
        yield from _runs(len(self._hidden), self._num_tokens)

    def of_entries(self) -> Iterator[slice]:
        yield from _runs(len(self._weight), self._num_entries)

    def logits(self, tokens: slice, entries: slice, rows: Tensor) -> tuple[Tensor, float]:
        """Return ([C, U], the factor that makes logits of it). rows: the head's weights of the entries."""
        form = self._form
        bias = None if self._bias is None else self._bias[entries].to(rows.dtype)
        products = torch.nn.functional.linear(self._hidden[tokens], rows, bias)
        if form.softcap is None:
            return products, form.scale / form.temperature
        return products.float().mul_(form.scale / form.softcap).tanh_(), form.softcap / form.temperature

    def target_columns(self, tokens: slice, entries: slice) -> tuple[Tensor, Tensor]:
        """Return (column of each token's target in the chunk, or another one; whether it is there), both [C, 1]."""
        columns = self._targets[tokens, None] - entries.start
        is_here = (columns >= 0) & (columns < entries.stop - entries.start)
        return torch.where(is_here, columns, 0), is_here

    def logit_gradient(self, tokens: slice, entries: slice, rows: Tensor, size: Tensor, log_sum: Tensor) -> Tensor:
        """Return [C, U] in the type of rows: size * (p - onehot(target)), the gradient of the product but for its sign.

        size: [C, 1], of the gradient of the logprobs by the product.
        """
        products, factor = self.logits(tokens, entries, rows)
        exponents = torch.add(size.log() - log_sum[:, None], products, alpha=factor)
        columns, is_here = self.target_columns(tokens, entries)
        at_target = exponents.gather(1, columns).exp_() - size * is_here
        is_capped = self._form.softcap is not None
        grad = exponents if is_capped else torch.empty_like(exponents, dtype=rows.dtype)
        torch.exp(exponents, out=grad)
        grad.scatter_(1, columns, at_target.to(grad.dtype))
        return grad.mul_(1.0 - products.square_()).to(rows.dtype) if is_capped else grad


class _OnlineSoftmax:
    """The softmax over the vocabulary entries so far, of one chunk of tokens; each [C, 1]."""

    def __init__(self, num_tokens: int, device: torch.device, with_entropy: bool) -> None:
        self._with_entropy = with_entropy
        # Finite, and below any logit: its product with a share of 0 must not be NaN.
        self._log_sum = torch.full((num_tokens, 1), -1e30, device=device)
        self._entropy = torch.zeros_like(self._log_sum)
        self._target = torch.zeros_like(self._log_sum)  # logit of the target, 0 before its chunk

    def add(self, products: Tensor, factor: float, columns: Tensor, is_here: Tensor) -> None:
        """Add the logits of more vocabulary entries, factor * products [C, U]."""
        self._target += torch.where(is_here, products.gather(1, columns), 0.0).float() * factor
        top, at_top = products.max(1, keepdim=True)
        top = top.float() * factor
        lower = torch.add(-top, products, alpha=factor)
        shares = torch.softmax(lower, 1)
        rest = -shares.gather(1, at_top).log()
        before, own = self._log_sum, top + rest
        self._log_sum = torch.logaddexp(before, own)
        if self._with_entropy:
            entropy = rest - torch.bmm(shares[:, None], lower[:, :, None])[:, 0]  # of log(share) = lower - rest
            # Two sets with shares w and entropies h have the entropy sum(w * (h - log w)).
            more, less = self._log_sum - own, self._log_sum - before  # -log w
            self._entropy = (-more).exp() * (entropy + more) + (-less).exp() * (self._entropy + less)

    def log_sums(self) -> Tensor:
        return self._log_sum[:, 0]

    def scores(self) -> Tensor:
        """Return [C, 2]: the targets' logprobs, and the entropies or zeros."""
        return torch.cat([self._target - self._log_sum, self._entropy], 1)


def _add_product(sums: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add left @ right to the float32 sums, in place; None: there are none yet."""
    if sums is None:
        return (left @ right).float()
    return sums.addmm_(left, right) if left.dtype == torch.float32 else sums.add_(left @ right)


def _runs(number: int, size: int) -> Iterator[slice]:
    for start in range(0, number, size):
        yield slice(start, min(start + size, number))


# `apply` has no types of its own.
_apply: Callable[[Tensor, Tensor, Tensor | None, Tensor, HeadForm, bool, int], Tensor] = _HeadLogprobs.apply
