"""The digest of weights: equal on CPU and device, and what it costs beside a copy of the same bytes."""

import statistics

from tests.gpu.finding import Finding, Machine, Part, seconds_of


def show(machine: Machine) -> Finding:
    import torch

    from protocol.weights.digest import bucket_sums, byte_sums
    from protocol.weights.wire import TensorMeta, bucket_num_bytes

    generator = torch.Generator().manual_seed(0)
    are_equal = True
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for number in (0, 1, 1000, 131_072, 1_000_003):
            tensor = torch.randn(number, generator=generator).to(dtype)
            are_equal &= torch.equal(byte_sums(tensor), byte_sums(tensor.to(machine.device)).cpu())
    num_bytes = 1 << (22 if machine.is_short else 30)
    weights = torch.randn(num_bytes // 2, device=machine.device).to(torch.bfloat16)
    other = torch.empty_like(weights)
    digest_s = statistics.median(seconds_of(lambda: byte_sums(weights), machine.device))
    copy_s = statistics.median(seconds_of(lambda: other.copy_(weights), machine.device))
    small = tuple(
        TensorMeta(f"w{number}", "bfloat16", (2048,)) for number in range(200 if machine.is_short else 20_000)
    )
    bucket = torch.randint(0, 256, (bucket_num_bytes(small),), dtype=torch.uint8, device=machine.device)
    are_equal &= torch.equal(bucket_sums(bucket, small).cpu(), bucket_sums(bucket.cpu(), small))
    small_s = statistics.median(seconds_of(lambda: bucket_sums(bucket, small), machine.device))
    figures = {
        f"{len(small)}_small_tensors_ms": 1e3 * small_s,
        "digest_GB_per_s": num_bytes / digest_s / 1e9,
        "copy_GB_per_s": num_bytes / copy_s / 1e9,
        "digest_over_copy": digest_s / copy_s,
    }
    return Finding("sums of four types and five sizes are those of the CPU" * are_equal or "DIFFER", are_equal, figures)


DIGEST = Part("digest", "a parameter's digest is the same on every device", ("torch", "blake3", "msgspec"), 1, show)
