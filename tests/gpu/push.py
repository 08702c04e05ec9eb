"""Weights from one process to another: over shared device memory (ipc) and over NCCL, against a copy on the device."""

import statistics
from typing import Any

from tests.gpu.finding import Finding, Machine, Part, seconds_of, unchecked

_NUM_PUSHES = 5


def show_ipc(machine: Machine) -> Finding:
    """Two processes on one device, through the group that a push of `weights.backend: ipc` uses."""
    import secrets
    import time

    import torch
    import torch.multiprocessing as multiprocessing

    from protocol.weights.digest import byte_sums
    from protocol.weights.same_machine import SameMachineGroup, listen_here

    num_bytes = 1 << (20 if machine.is_short or machine.device == "cpu" else 28)
    context = multiprocessing.get_context("spawn")
    name, answers = secrets.token_hex(16), context.Queue()
    listener = listen_here(name)
    server = context.Process(target=_take, args=(name, num_bytes, answers), daemon=True)
    server.start()
    group = SameMachineGroup.send(listener, 1, 120.0)
    listener.close()
    bucket = torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
    other = torch.empty_like(bucket)
    copy_s = statistics.median(seconds_of(lambda: other.copy_(bucket), machine.device))
    push_s, expected = [], []
    for version in range(_NUM_PUSHES + 1):
        bucket.fill_(version).view(-1)[:256] = torch.arange(256, dtype=torch.uint8, device=group.device)
        expected.append(byte_sums(bucket).tolist())
        started = time.perf_counter()
        group.broadcast(bucket)
        push_s.append(time.perf_counter() - started)
    are_equal = answers.get(timeout=120.0) == expected
    group.close()
    server.join(30.0)
    figures = {
        "push_GB_per_s": num_bytes / statistics.median(push_s[1:]) / 1e9,
        "copy_GB_per_s": num_bytes / copy_s / 1e9,
    }
    sentence = f"{_NUM_PUSHES + 1} pushes of {num_bytes >> 20} MiB" + ("" if are_equal else ": digests DIFFER")
    return Finding(sentence, are_equal and server.exitcode == 0, figures)


def _take(name: str, num_bytes: int, answers: Any) -> None:
    """Take each push into memory of this process, and answer with the digest of each."""
    import torch

    from protocol.weights.digest import byte_sums
    from protocol.weights.same_machine import SameMachineGroup

    group = SameMachineGroup.receive(name, 120.0)
    own = torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
    found = []
    for _ in range(_NUM_PUSHES + 1):
        group.broadcast(own)
        found.append(byte_sums(own).tolist())
    answers.put(found)
    group.close()


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
    group = NcclGroup(listener, 2, 60.0)
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
        nccl_broadcast(communicator, flat, 60.0)
    answers.put(byte_sums(flat).tolist())


IPC = Part("ipc", "a bucket reaches another process of the device whole", ("torch", "blake3", "msgspec"), 1, show_ipc)
NCCL = Part("nccl", "a bucket reaches another GPU whole", ("torch", "blake3", "msgspec", "vllm"), 2, show_nccl)
