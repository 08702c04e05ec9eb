"""Weights from one process to another: over shared device memory (ipc) and over NCCL, against a copy on the device."""

import statistics
from typing import Any

from tests.gpu.finding import Finding, Machine, Part, unchecked
from tests.gpu.timing import seconds_of

_NUM_PUSHES = 5


def show_ipc(machine: Machine) -> Finding:
    """Two processes on one device: the handle of a bucket goes through a queue, its bytes stay where they are."""
    import torch
    import torch.multiprocessing as multiprocessing

    from protocol.weights.digest import byte_sums

    num_bytes = 1 << (20 if machine.is_short or machine.device == "cpu" else 28)
    context = multiprocessing.get_context("spawn")
    handles, answers = context.Queue(), context.Queue()
    server = context.Process(target=_take, args=(handles, answers, machine.device), daemon=True)
    server.start()
    bucket = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
    other = torch.empty_like(bucket)
    copy_s = statistics.median(seconds_of(lambda: other.copy_(bucket), machine.device))
    push_s, are_equal = [], True
    for version in range(_NUM_PUSHES + 1):
        bucket.fill_(version).view(-1)[:256] = torch.arange(256, dtype=torch.uint8, device=machine.device)
        expected = byte_sums(bucket).tolist()
        handles.put(bucket)
        found, seconds = answers.get(timeout=120.0)
        are_equal &= found == expected
        push_s.append(seconds)
    handles.put(None)
    server.join(30.0)
    figures = {
        "push_GB_per_s": num_bytes / statistics.median(push_s[1:]) / 1e9,
        "copy_GB_per_s": num_bytes / copy_s / 1e9,
    }
    sentence = f"{_NUM_PUSHES + 1} pushes of {num_bytes >> 20} MiB" + ("" if are_equal else ": digests DIFFER")
    return Finding(sentence, are_equal and server.exitcode == 0, figures)


def _take(handles: Any, answers: Any, device: str) -> None:
    """Copy each bucket that comes into memory of this process, and answer with its digest and the copy's seconds."""
    import time

    import torch

    from protocol.weights.digest import byte_sums

    while (bucket := handles.get()) is not None:
        started = time.perf_counter()
        own = bucket.clone()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        answers.put((byte_sums(own).tolist(), seconds))
        del bucket, own


def show_nccl(machine: Machine) -> Finding:
    """Two processes on two GPUs, through the group that a push uses (vLLM's rendezvous)."""
    import socket
    import time

    import torch
    import torch.multiprocessing as multiprocessing

    from protocol.weights.digest import byte_sums
    from protocol.weights.group import NcclGroup

    if machine.device != "cuda":
        return unchecked("NCCL has no CPU form")
    num_bytes = 1 << (22 if machine.is_short else 30)
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    server = context.Process(target=_receive, args=(port, num_bytes, answers), daemon=True)
    server.start()
    group = NcclGroup(listener, 2)
    bucket = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    push_s = []
    for _ in range(_NUM_PUSHES + 1):
        started = time.perf_counter()
        group.broadcast(bucket)
        push_s.append(time.perf_counter() - started)
    are_equal = answers.get(timeout=120.0) == byte_sums(bucket).tolist()
    group.close()
    server.join(30.0)
    figures = {"push_GB_per_s": num_bytes / statistics.median(push_s[1:]) / 1e9}
    return Finding(f"{_NUM_PUSHES + 1} broadcasts of {num_bytes >> 20} MiB", are_equal, figures)


def _receive(port: int, num_bytes: int, answers: Any) -> None:
    import torch
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    from protocol.weights.digest import byte_sums
    from protocol.weights.group import nccl_broadcast

    torch.cuda.set_device(1)
    communicator = stateless_init_process_group("127.0.0.1", port, 1, 2, device=1)
    flat = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    for _ in range(_NUM_PUSHES + 1):
        nccl_broadcast(communicator, flat)
    answers.put(byte_sums(flat).tolist())


IPC = Part("ipc", "a bucket reaches another process of the device whole", ("torch", "blake3", "msgspec"), 1, show_ipc)
NCCL = Part("nccl", "a bucket reaches another GPU whole", ("torch", "blake3", "msgspec", "vllm"), 2, show_nccl)
