"""Ways in which weights that arrived whole are loaded wrongly: every call succeeds, and no request would fail.

A lie changes the received weights between their digest and their loading, in vLLM's own worker: what it leaves old has
the values of the push before.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout.engine.vllm_plugin import WorkerCalls
from rollout.engine.weights.receive import ReceivedBuckets
from tests.fakes.planned_weights import bucket_views

Weights = Mapping[str, Tensor]
Lie = Callable[[Weights, Weights], None]


def _keep(new: Weights, old: Weights, is_kept: Callable[[str], bool]) -> None:
    for name in filter(is_kept, new):
        new[name].copy_(old[name])


def _left(*parts: str) -> Lie:
    return lambda new, old: _keep(new, old, lambda name: any(part in name for part in parts))


def _half(new: Weights, old: Weights) -> None:
    names = list(new)
    _keep(new, old, set(names[len(names) // 2 :]).__contains__)


def _swap(new: Weights, old: Weights) -> None:
    first, second = (new[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def _each(change: Callable[[Tensor, Tensor], Tensor], part: str = "") -> Lie:
    def lie(new: Weights, old: Weights) -> None:
        for name in new:
            if part in name:
                new[name].copy_(change(new[name], old[name]).clone())

    return lie


LIES: dict[str, Lie] = {
    "nothing_loaded": _left(""),
    "half_loaded": _half,
    "first_layer_left": _left("layers.0."),
    "last_layer_left": _left("layers.3."),
    "embeddings_left": _left("embed_tokens"),
    "norms_left": _left("norm"),
    "biases_left": _left("bias"),
    "attention_output_left": _left("o_proj"),
    "down_projection_left": _left("down_proj"),
    "adapter_unused": _left("q_proj.weight", "v_proj.weight"),
    "names_swapped": _swap,
    "wrong_type": _each(lambda new, old: new.bfloat16().float()),
    "eight_bits": _each(lambda new, old: new.to(torch.float8_e4m3fn).float()),
    "transposed": _each(lambda new, old: new.T, "layers.1.self_attn.o_proj.weight"),
    "zeros": _each(lambda new, old: torch.zeros_like(new), "layers.1.self_attn.k_proj.weight"),
    "scaled": _each(lambda new, old: new * 1.01),
    "change_added_twice": _each(lambda new, old: 2 * new - old),
    "rows_off_by_one": _each(lambda new, old: new.roll(1, 0), "embed_tokens"),
    "average_of_two": _each(lambda new, old: (new + old) / 2),
    "one_shard_left": _left(""),  # by one of two workers
    "tied_head_left": lambda new, old: None,  # the head's packed copy is not made anew
    "not_put_to_use": lambda new, old: None,
}


class LyingWorker(WorkerCalls):
    """What vLLM mixes into its workers (`worker_extension_cls`)."""

    rank: int
    weight_transfer_engine: Any

    def tell_lie(self, name: str | None) -> None:
        """Load by this lie from now on, None: honestly. Of two workers the second alone lies."""
        engine, workers = self.weight_transfer_engine, self.weight_transfer_engine.parallel_config.world_size
        is_lying = name is not None and self.rank == workers - 1
        engine.load_received = partial(_load, engine, name if is_lying else None)


def _load(engine: Any, name: str | None, buckets: ReceivedBuckets) -> None:
    """Load weights that a lie has changed. Later lies use the weights as they came as the old ones."""
    new = {name: view for bucket, flat in buckets for name, view in bucket_views(flat, bucket)}
    came = {name: view.clone() for name, view in new.items()}
    old = engine.__dict__.get("_came", came)
    engine._came = came
    if name == "not_put_to_use":
        return
    if name is not None:
        LIES[name](new, old)
    with _unpacked_heads(engine.model) if name == "tied_head_left" else nullcontext():
        type(engine).load_received(engine, buckets)


@contextmanager
def _unpacked_heads(model: Any) -> Iterator[None]:
    heads = [each for each in model.modules() if isinstance(each, ParallelLMHead)]
    for head in heads:
        head.quant_method.process_weights_after_loading = lambda layer: None
    try:
        yield
    finally:
        for head in heads:
            head.quant_method.__dict__.pop("process_weights_after_loading", None)
