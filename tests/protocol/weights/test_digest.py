"""The digest of weights, against a slow loop over bytes that shares nothing with it but the formula."""

import os
import subprocess
import sys
from functools import cache
from itertools import pairwise

import pytest
import torch

from protocol.weights.digest import (
    WeightDigest,
    bucket_sums,
    byte_sums,
    digest_of_tensor,
    exact_product,
    float64_product,
    int8_product,
    is_exact,
)
from protocol.weights.wire import Bucket, TensorMeta, bucket_num_bytes
from tests.fakes.planned_weights import bucket_views, plan_buckets

METAS = [
    TensorMeta("embed", "float32", (3, 4)),
    TensorMeta("norm", "bfloat16", (21,)),
    TensorMeta("head", "float32", (13, 4)),
]
_MASK = (1 << 64) - 1


def digested(plan: tuple[Bucket, ...], weights: dict[str, torch.Tensor]) -> WeightDigest:
    digest = WeightDigest(plan)
    for bucket in plan:
        flat = torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8)
        for name, view in bucket_views(flat, bucket):
            view.copy_(weights[name])
        digest.add(flat)
    return digest


def digest_of(plan: tuple[Bucket, ...], weights: dict[str, torch.Tensor]) -> str:
    return digested(plan, weights).hexdigest()


def weights_of(metas: list[TensorMeta]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {meta.name: torch.randn(meta.shape, generator=generator).to(getattr(torch, meta.dtype)) for meta in metas}


def mixed(number: int) -> int:
    z = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (z ^ z >> 31) | 1


@cache
def factors_of(column: int) -> list[int]:
    drawn = [(mixed(column * 16 + number + (1 << 40)) >> 40) % 126 for number in range(16)]
    return [number - 63 if number < 63 else number - 62 for number in drawn]


def slow_sums(data: bytes) -> list[int]:
    """Return 16 sums modulo 2**64: byte by byte, a factor for its place in the row, and one for its row."""
    sums = [0] * 16
    for place, byte in enumerate(data):
        row, column = divmod(place, 4096)
        value = (byte - 256 if byte > 127 else byte) * mixed(row)
        for number, factor in enumerate(factors_of(column)):
            sums[number] += value * factor
    return [(total & _MASK) - (1 << 64) if total & _MASK >= 1 << 63 else total & _MASK for total in sums]


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 32 * 4096, 33 * 4096 + 5])
def test_sums_are_those_of_a_slow_loop(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))

    assert byte_sums(data).tolist() == slow_sums(bytes(data.tolist()))


def test_sums_of_a_bucket_are_those_of_each_tensor() -> None:
    generator = torch.Generator().manual_seed(2)
    bucket = tuple(
        TensorMeta(str(size), "uint8", (size,)) for size in [5, 0, 4096, 65 * 4096, 4097, 1300 * 4096, 16 * 4096 + 1, 7]
    )
    flat = torch.zeros(bucket_num_bytes(bucket), dtype=torch.uint8)
    views = [view for _, view in bucket_views(flat, bucket)]
    for view in views:
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=generator))

    assert bucket_sums(flat, bucket).tolist() == [byte_sums(view).tolist() for view in views]


def test_a_device_whose_integer_product_is_wrong_or_missing_is_seen() -> None:
    def missing(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    def saturated(rows: torch.Tensor) -> torch.Tensor:
        return int8_product(rows).clamp(-(1 << 24), 1 << 24)

    def wrong_when_large(rows: torch.Tensor) -> torch.Tensor:
        return int8_product(rows) + (len(rows) > 1 << 10)

    products = (missing, saturated, wrong_when_large, int8_product, float64_product)

    assert [is_exact(product, torch.device("cpu")) for product in products] == [False, False, False, True, True]


def test_matrix_has_contiguous_columns_as_cublas_supports_for_int8() -> None:
    from protocol.weights.digest import _matrix

    assert _matrix(torch.device("cpu")).stride() == (1, 4096)


def test_extreme_bytes_are_summed_exactly_on_a_cpu_of_any_age() -> None:
    """A CPU without VNNI adds two products in 16 bits; oneDNN is told that this is one."""
    script = (
        "import torch; from protocol.weights.digest import byte_sums; "
        "print([byte_sums(torch.full((64 * 1024,), each, dtype=torch.uint8)).tolist() for each in (0, 127, 128, 255)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout.strip()

    assert found == str([slow_sums(bytes([each]) * 64 * 1024) for each in (0, 127, 128, 255)])


def test_sums_are_computed_on_the_parameters_device() -> None:
    large = torch.empty(200_000, dtype=torch.bfloat16, device="meta")
    bucket = (TensorMeta("a", "uint8", (10_000,)), TensorMeta("b", "uint8", (5,)))
    found = [
        byte_sums(large),
        *bucket_sums(torch.empty(bucket_num_bytes(bucket), dtype=torch.uint8, device="meta"), bucket),
    ]

    assert exact_product(torch.device("meta")) is int8_product
    assert [(sums.device.type, sums.dtype, tuple(sums.shape)) for sums in found] == [("meta", torch.int64, (16,))] * 3


def test_every_single_bit_counts() -> None:
    weights = weights_of(METAS)
    plan = plan_buckets(METAS, 1 << 20)
    whole = digest_of(plan, weights)
    seen = {whole}
    for tensor in weights.values():
        raw = tensor.reshape(-1).view(torch.uint8)
        for place in range(len(raw)):
            for bit in range(8):
                raw[place] ^= 1 << bit
                seen.add(digest_of(plan, weights))
                raw[place] ^= 1 << bit
    num_bits = 8 * sum(meta.num_bytes for meta in METAS)

    assert len(seen) == num_bits + 1
    assert digest_of(plan, weights) == whole


def test_changes_that_a_plain_sum_does_not_see_are_seen() -> None:
    weights = {"embed": torch.arange(1.0, 13.0).view(3, 4)}
    meta = METAS[0]
    swapped = weights["embed"].clone()
    swapped[0, 0], swapped[2, 3] = weights["embed"][2, 3], weights["embed"][0, 0]
    negated = weights["embed"].clone()
    negated[0] *= -1.0  # an even number of highest bits
    digests = {digest_of(((meta,),), {"embed": tensor}) for tensor in (weights["embed"], swapped, negated)}

    assert len(digests) == 3


def test_digest_changes_with_a_name_a_dtype_or_a_shape() -> None:
    digests = {
        digest_of(((TensorMeta(name, dtype, shape),),), {name: torch.zeros(shape, dtype=getattr(torch, dtype))})
        for name, dtype, shape in [
            ("embed", "float32", (3, 4)),
            ("other", "float32", (3, 4)),
            ("embed", "int32", (3, 4)),
            ("embed", "float32", (4, 3)),
        ]
    }

    assert len(digests) == 4


def test_neither_buckets_nor_order_count() -> None:
    weights = weights_of(METAS)

    digests = {
        digest_of(plan_buckets(metas, bucket_bytes), weights)
        for metas in (METAS, METAS[::-1])
        for bucket_bytes in (1, 100, 1 << 20)
    }

    assert len(digests) == 1


def test_digest_is_stable() -> None:
    weights = {meta.name: torch.ones(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in METAS}

    assert (
        digest_of(plan_buckets(METAS, 1 << 20), weights)
        == "d85128c0af998c0cda1adee3fecc71c1c87648e5dc30cc9f1e3d00d9f163e23a"
    )


def test_each_parameters_digest_has_its_name() -> None:
    weights = weights_of(METAS)
    plan = plan_buckets(METAS, 1 << 20)

    before = digested(plan, weights).by_name()
    weights["norm"][3] += 1.0
    after = digested(plan, weights).by_name()

    assert [name for name in before if before[name] != after[name]] == ["norm"]


@pytest.mark.parametrize("cuts", [(4,), (4096, 8192), (4092, 4100, 140_000), (131_072 + 8,)])
def test_byte_sums_of_a_parameters_parts_add_up_to_those_of_the_whole(cuts: tuple[int, ...]) -> None:
    whole = torch.randn(60_003, generator=torch.Generator().manual_seed(5))
    bounds = [0, *(cut // 4 for cut in cuts), len(whole)]

    parts = [byte_sums(whole[a:b], first_byte=4 * a) for a, b in pairwise(bounds)]

    assert torch.equal(sum(parts, torch.zeros_like(parts[0])), byte_sums(whole))


def test_digest_of_a_tensor_is_that_of_the_same_parameter_in_a_push() -> None:
    weights = weights_of(METAS)
    found = digested((tuple(METAS),), weights).by_name()
    assert found == {name: digest_of_tensor(name, tensor) for name, tensor in weights.items()}
