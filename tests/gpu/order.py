"""What a push leaves to the device's streams: a bucket is sent once it is packed, and a lost peer ends a broadcast."""

import time
from concurrent.futures import ThreadPoolExecutor

from tests.gpu.finding import Finding, Machine, Part, unchecked

_NEEDS = ("torch", "msgspec")


def show_order(machine: Machine) -> Finding:
    """Pack after slow work on one stream, and read in a thread with a stream of its own, as a push does."""
    import torch

    from learner.weights.feed import BucketMemory, pack
    from protocol.weights.wire import TensorMeta

    size = 64 if machine.device == "cpu" else 8192
    plan = ((TensorMeta("weight", "float32", (size, size)),),) * 4
    slow = torch.randn(size, size, device=machine.device)

    def gathered(number: int) -> tuple[str, torch.Tensor]:
        for _ in range(10):
            slow @ slow  # the packing of this bucket waits behind it
        return "weight", torch.full((size, size), float(number), device=machine.device)

    def read(flat: torch.Tensor) -> torch.Tensor:
        if machine.device == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                return flat.view(torch.float32).clone().cpu()
        return flat.view(torch.float32).clone()

    with ThreadPoolExecutor(1) as thread:
        buckets = pack(plan, ([gathered(number)] for number in range(4)), BucketMemory(plan, machine.device))
        found = [thread.submit(read, flat).result() for flat in buckets]
    are_whole = all(bool((each == number).all()) for number, each in enumerate(found))
    return Finding("four buckets behind slow kernels, read on another stream", are_whole)


def show_lost_peer(machine: Machine) -> Finding:
    """A broadcast whose kernel does not end is given up at its deadline."""
    import torch

    from protocol.weights.group import PeerLostError, nccl_broadcast

    if machine.device != "cuda":
        return unchecked("streams of a CPU do not wait; tests/protocol/weights/test_nccl_deadline.py has its shape")

    class Communicator:
        is_aborted = False

        def broadcast(self, flat: torch.Tensor, src: int, stream: object) -> None:
            torch.cuda._sleep(10_000_000_000)  # 5 s or more

        def destroy(self) -> None:
            self.is_aborted = True

    communicator, started, error = Communicator(), time.perf_counter(), ""
    try:
        nccl_broadcast(communicator, torch.zeros(1, device="cuda"), 0.5)
    except PeerLostError as lost:
        error = str(lost)
    taken = time.perf_counter() - started
    return Finding(error or "it ended", communicator.is_aborted and taken < 1.0, {"seconds": taken})


ORDER = Part("order", "a bucket is sent once it is packed", _NEEDS, 1, show_order)
LOST_PEER = Part("lost_peer", "a broadcast without its peer ends", _NEEDS, 1, show_lost_peer)
