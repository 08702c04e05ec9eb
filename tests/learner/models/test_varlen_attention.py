"""The packed forward and backward pass against transformers' own attention, one trajectory at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.models import varlen_attention
from learner.models.micro_batch import LearnerSample, make_micro_batch
from learner.models.varlen_attention import Segments, flash
from learner.models.varlen_attention import varlen_attention as attend
from tests.fakes.tiny_models import make_tiny_model

LENGTHS = (1, 40, 40, 33, 7, 3, 40, 21)


def samples() -> list[LearnerSample]:
    rng = np.random.default_rng(0)
    made = []
    for length in LENGTHS:
        mask = rng.random(length) < 0.6
        mask[0] = False
        made.append(LearnerSample(rng.integers(0, 272, length).astype(np.int32), mask, np.zeros(length, np.float32)))
    return sorted(made, key=lambda s: -len(s.tokens))


@pytest.fixture(params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", tied=request.param == "tied", hidden_size=64)


def test_packed_logprobs_and_gradients_equal_the_unpacked_ones(folder: Path) -> None:
    varlen_attention.register()
    packed = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=varlen_attention.NAME)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")

    batch = make_micro_batch(samples())
    logits = packed(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        logits_to_keep=batch.predict_at,
        segments=Segments(batch.lengths, torch.device("cpu")),
    ).logits[0]
    found = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    found.sum().backward()

    expected = []
    for sample in samples():
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        scores = plain(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        every = scores.gather(1, tokens[0, 1:, None])[:, 0]
        expected.append(every[torch.from_numpy(sample.loss_mask[1:])])
    torch.cat(expected).sum().backward()

    assert len(found) == sum(int(s.loss_mask.sum()) for s in samples()) > 50
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [(5,), (9, 9, 9), (16, 13, 12, 4, 1)])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_attention_equals_the_formula_in_float64(
    lengths: tuple[int, ...], num_key_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    q = torch.randn(1, 4, total, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, num_key_heads, total, 8, dtype=torch.float64)
    segments = Segments(lengths, torch.device("cpu"))
    found, _ = attend(torch.nn.Module(), q, k, v, None, 0.3, sliding_window=window, segments=segments)
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            for head in range(4):
                group = head * num_key_heads // 4
                seen = slice(start if window is None else max(start, t + 1 - window), t + 1)
                weights = (0.3 * k[0, group, seen] @ q[0, head, t]).softmax(0)
                torch.testing.assert_close(found[0, t, head], weights @ v[0, group, seen])
        start += length


# Two whole segments, and others after a part of the first or the second.
SHARED = (9, 7, 5, 4, 1, 3, 3)
PROMPTS = ((0, 0), (0, 0), (0, 6), (0, 6), (0, 6), (9, 4), (9, 4))


def seen_by(place: int, window: int | None) -> list[int]:
    """Return the flat places that a flat place sees."""
    start = 0
    for length, (prompt, number) in zip(SHARED, PROMPTS, strict=True):
        if start <= place < start + length:
            seen = [*range(prompt, prompt + number), *range(start, place + 1)]
            return seen[-(window or len(seen)) :]
        start += length
    raise AssertionError(place)


@pytest.mark.parametrize("num_key_heads", [4, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_segments_see_the_prompt_that_they_share(num_key_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 4, sum(SHARED), 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, num_key_heads, sum(SHARED), 8, dtype=torch.float64)
    segments = Segments(SHARED, torch.device("cpu"), PROMPTS)
    found, _ = attend(torch.nn.Module(), q, k, v, None, 0.3, sliding_window=window, segments=segments)
    for place in range(sum(SHARED)):
        seen = seen_by(place, window)
        for head in range(4):
            group = head * num_key_heads // 4
            weights = (0.3 * k[0, group, seen] @ q[0, head, place]).softmax(0)
            torch.testing.assert_close(found[0, place, head], weights @ v[0, group, seen])


@pytest.mark.parametrize("window", [None, 3, 8])
def test_the_gpus_kernel_gets_each_prompt_once_for_each_segment_that_sees_it(window: int | None) -> None:
    torch.manual_seed(0)
    segments = Segments(SHARED, torch.device("cpu"), PROMPTS)
    whole = [torch.randn(1, heads, sum(SHARED), 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ends_q: torch.Tensor,
        ends_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        scale: float,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Flash attention's contract: in each segment the last query and the last key are at one place."""
        assert (longest_q, longest_k) == (9, 11)
        outputs = []
        for q_, k_, v_ in zip(*(_cut(*each) for each in ((q, ends_q), (k, ends_k), (v, ends_k))), strict=True):
            places = torch.arange(len(k_))
            distances = places[-len(q_) :, None] - places
            mask = (distances >= 0) & (distances <= (window_size[0] if window_size[0] >= 0 else len(k_)))
            rows = [each.transpose(0, 1) for each in (q_, k_, v_)]
            out = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale, enable_gqa=True)
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)

    found = flash([each[0].transpose(0, 1) for each in whole], segments, None, window, kernel)
    expected = attend(torch.nn.Module(), *whole, None, sliding_window=window, segments=segments)[0][0]
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), whole) for out in (found, expected))
    torch.testing.assert_close(ours, theirs)


def _cut(tokens: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tokens, ends.diff().tolist())


@pytest.mark.parametrize(
    ("lengths", "prompts"), [((4, 3, 3, 1), ()), ((4, 3, 2, 2, 1), ((0, 0), (0, 0), (0, 3), (0, 3), (4, 1)))]
)
def test_attention_gradient_passes_the_numeric_check(
    lengths: tuple[int, ...], prompts: tuple[tuple[int, int], ...]
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, sum(lengths), 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    segments = Segments(lengths, torch.device("cpu"), prompts)
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend(torch.nn.Module(), q, k, v, None, 0.5, segments=segments)[0], inputs
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"softcap": 30.0}, "has no softcap")],
)
def test_attention_refuses_unsupported_options(asked: dict[str, float], message: str) -> None:
    q = torch.zeros(1, 1, 5, 2)
    with pytest.raises(ValueError, match=message):
        attend(torch.nn.Module(), q, q, q, None, segments=Segments((5,), torch.device("cpu")), **asked)


def test_attention_refuses_a_batch_without_segments() -> None:
    q = torch.zeros(1, 1, 5, 2)
    with pytest.raises(ValueError, match="needs the micro-batch's segments"):
        attend(torch.nn.Module(), q, q, q, None)


def test_the_gpus_kernel_gets_one_head_size_that_it_supports_and_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    segments = Segments((5, 3), torch.device("cpu"))
    q, k, v = (torch.randn(1, heads, 8, size) for heads, size in ((4, 12), (2, 12), (2, 6)))  # as MLA: v is smaller
    seen = []

    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: object, scale: float, window_size: tuple[int, int]
    ) -> torch.Tensor:
        """Torch 2.11's interface, without groups."""
        seen.append([tuple(each.shape) for each in (q, k, v)])
        assert "blocks" not in vars(segments)  # rows of the CPU's path cost a GPU nothing
        rows = [each.transpose(0, 1)[None] for each in (q, k, v)]
        out = attend(
            torch.nn.Module(), *rows, None, scaling=scale, sliding_window=window_size[0] + 1, segments=segments
        )
        return out[0][0]

    found = flash([each[0].transpose(0, 1) for each in (q, k, v)], segments, None, 3, kernel)
    expected = attend(torch.nn.Module(), q, k, v, None, sliding_window=3, segments=segments)[0][0]
    assert seen == [[(8, 4, 16)] * 3]
    torch.testing.assert_close(found, expected)
