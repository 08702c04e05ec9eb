"""The memory of one learner rank's models, estimated without torch.

DeepSpeed 0.19, n trained and f frozen parameters over r ranks, types of b and 4 bytes:

    stage   weights        gradients   master weights, moments   permanent bucket
    0       (n + f) b      4 n         8 n                       -
    1       (n + f) b      4 n         12 n / r                  -
    2       (n + f) b      4 n / r     12 n / r                  -
    3       (n + f) b / r  4 n / r     12 n / r                  b m, m = min(n, 0.5e9)

The temporary part is the largest of the backward pass, of the reduction of gradients, of a push, and of the start's
check. A pass holds activations, chunks of logits, the gradient of the embedding (e parameters), and at stage 3 gathered
weights:

    stage   backward pass                               reduction
    0       activations + b e                           4 m
    1, 2    activations + b e + b m                     2 b m + 4 min(n / r, e)
    3       activations + b e + b min(n + f, 1e9)       b e + b m + 4 m / r

Offloading keeps the gradients twice on the host, at stage 1 also on the device. Below stage 3 the host also holds a
second copy of the weights, and both hold a buffer of the embedding.
Source: ZeRO, arXiv:1910.02054, section 3; DeepSpeed's reduce_bucket_size and stage3_max_live_parameters, or all experts
of a layer, which are one weight. Measured: tests/learner/plan/measured_ranks.py.

A model that is only scored has its weights alone, over r ranks at stage 3.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from learner.disk.model_folder import BYTES, ModelSize, find_named_model, read_model_size
from learner.plan.needs import is_reference_the_base, is_trained, needs_critic, needs_reference
from protocol.settings.settings import Settings
from protocol.settings.zero_stage import Offload, critic_zero, zero_stage_of

_FLOAT32 = 4
_MAX_BUCKET = 500_000_000  # parameters per reduction of gradients
_MAX_GATHERED = 1_000_000_000  # parameters gathered at once
# learner/models/scoring/head_logprobs.py: logits of a chunk on CPUs and on GPUs, with 12 bytes for each, and rows of
# the head whose gradient is summed in float32.
_CHUNK_NUMBERS = {False: 1 << 22, True: 1 << 26}
_CHUNK_ROWS = 8192
_FEW_LAYERS = 5  # layers that the start's check computes at most, unless it needs one of each kind


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    device: int  # memory of its GPU, or of the host without one
    host: int = 0  # offloaded part on the host
    # largest temporary part of `device`: buckets, gathered weights, activations
    passing: int = field(default=0, compare=False)
    gradients: int = field(default=0, compare=False)  # part of `passing` that is there in each step

    @property
    def state(self) -> int:
        """The part of `device` without which no step is possible."""
        return self.device - self.passing + self.gradients

    def __add__(self, other: "Memory") -> "Memory":
        """Return the memory of two models. Only one of them is computed at a time."""
        passing, gradients = max(self.passing, other.passing), max(self.gradients, other.gradients)
        permanent = self.device - self.passing + other.device - other.passing
        return Memory(permanent + passing, self.host + other.host, passing, gradients)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run's models."""

    policy: ModelSize
    critic: ModelSize | None = None  # None: no critic, or one as the policy
    reference: ModelSize | None = None  # None: likewise


def read_sizes(settings: Settings, model: Path) -> Sizes:
    """Return the sizes of a run's models. model: the policy's folder."""
    named = {
        setting: read_model_size(find_named_model(f"{setting}.model", name))
        for setting, name in (("critic", settings.critic.model), ("reference", settings.reference.model))
        if name
    }
    return Sizes(read_model_size(model, settings.policy.lora), named.get("critic"), named.get("reference"))


def rank_memory(settings: Settings, sizes: Sizes, bucket_bytes: int = 0, *, on_gpus: bool = False) -> Memory:
    """Return rank 0's memory of policy, critic and reference in a step, a push and the start.

    bucket_bytes: of a push's bucket on the rank's device; 0: there is no push.
    """
    learner, dtype = settings.learner, settings.policy.dtype
    policy, stage = sizes.policy, zero_stage_of(learner.zero_stage, settings.policy.dtype)
    sent = sending_bytes(policy, dtype, stage, bucket_bytes)
    push = Memory(sent, passing=sent)
    if not is_trained(settings):
        weights = (policy.parameters + policy.adapters) * BYTES[dtype]
        return Memory(weights // (learner.num_ranks if stage == 3 else 1)) + push
    of_head = _logits_bytes(policy, settings) if settings.objective == "distill" else _head_bytes(policy, on_gpus)
    in_pass = activation_bytes(policy, settings) + of_head
    total = trained_memory(policy, dtype, stage, learner.num_ranks, learner.offload, in_pass) + push
    zero = learner.deepspeed.get("zero_optimization") or {}
    if stage == 3 and (num_sharers := zero.get("zero_hpz_partition_size", 1)) > 1:  # each node has all weights again
        total += Memory((policy.parameters + policy.adapters) * BYTES[dtype] // num_sharers)
    if needs_critic(settings):
        critic, (asked, offload) = sizes.critic or replace(policy, adapters=0), critic_zero(settings)
        in_pass = activation_bytes(critic, settings)
        total += trained_memory(critic, dtype, zero_stage_of(asked, dtype), learner.num_ranks, offload, in_pass)
    if needs_reference(settings) and not is_reference_the_base(settings):
        of_reference = (sizes.reference or policy).parameters * BYTES[dtype] // (learner.num_ranks if stage == 3 else 1)
        # An offloaded reference is on the device during use, with the policy.
        total += Memory(of_reference, of_reference if settings.reference.offload and stage != 3 else 0)
    more = max(0, _check_bytes(policy) - total.device - (0 if on_gpus else total.host))
    return replace(total, device=total.device + more, passing=total.passing + more)


def loading_bytes(settings: Settings, sizes: Sizes) -> int:
    """Return the host memory of rank 0 while it reads its largest model, before the ranks divide it.

    The other ranks have weights without memory until they get their part.
    """
    models = [sizes.policy]
    models += [sizes.critic or sizes.policy] if needs_critic(settings) else []
    models += [sizes.reference or sizes.policy] if needs_reference(settings) else []
    return max(model.parameters for model in models) * BYTES[settings.policy.dtype]


def push_bytes(settings: Settings, size: ModelSize, bucket_bytes: int, *, on_gpus: bool) -> int:
    """Return what a push adds to each of a server's GPUs, or to its CPUs' memory.

    vLLM makes a second copy of the layer that it loads, and keeps what came of the layer until all of it has come:
    views of up to two buckets, or the experts' shards. For a CPU it then packs the experts, which is a third copy.
    bucket_bytes: 0 where buckets are in the host's memory.
    """
    width, num_workers = BYTES[settings.policy.dtype], settings.rollout.tensor_parallel_size
    largest, experts = width * size.largest_weight, width * 3 * size.stacked_experts // 2
    of_largest = max(bucket_bytes, largest if bucket_bytes else 0) + largest // num_workers
    return max(of_largest, 2 * bucket_bytes, bucket_bytes + (2 if on_gpus else 3) * experts // num_workers)


def trained_memory(
    size: ModelSize, dtype: str, zero_stage: int, num_ranks: int, offload: Offload, in_pass: int = 0
) -> Memory:
    """Return one rank's memory of a trained model.

    zero_stage: the effective stage. in_pass: bytes of activations and of the head's chunks.
    """
    width, trained = BYTES[dtype], size.adapters or size.parameters
    of_all = (size.parameters + size.adapters) * width
    largest = 0 if size.adapters else width * size.largest_weight
    if zero_stage == 0:
        # A tied embedding has two gradients until they are added.
        passing = max(in_pass + largest, 2 * largest, _FLOAT32 * min(_MAX_BUCKET, trained))
        gradients = _FLOAT32 * trained
        return Memory(of_all + 8 * trained + gradients + passing, 0, gradients + passing, gradients)
    reduced = min(_MAX_BUCKET, trained)
    bucket = width * reduced
    gradients = _FLOAT32 * trained // (1 if zero_stage == 1 else num_ranks)
    optimizer = 12 * trained // num_ranks
    if zero_stage < 3:
        converted = min(trained // num_ranks, size.largest_weight or trained)  # one weight at a time
        passing = bucket + max(in_pass + largest, bucket + _FLOAT32 * converted)
        weights, kept, again = of_all, largest, largest + width * trained // num_ranks
    else:
        gathered = width * max(min(size.parameters + size.adapters, _MAX_GATHERED), size.stacked_experts)
        reduction = bucket + _FLOAT32 * reduced // num_ranks
        # With several buckets, the first is reduced while the pass still has its activations.
        in_backward = gathered + in_pass + (reduction if trained > reduced else 0)
        passing = largest + max(in_backward, reduction)
        weights, kept, again = of_all // num_ranks, bucket, 0
    if offload == "none":
        kept, gradients = (bucket + gradients, 0) if zero_stage == 3 else (0, gradients)
        return Memory(weights + optimizer + kept + gradients + passing, 0, gradients + passing, gradients)
    on_host = optimizer + 2 * _FLOAT32 * trained // num_ranks + again
    if offload == "optimizer":
        kept += weights + (gradients if zero_stage == 1 else 0)
        return Memory(kept + passing, on_host, passing)
    return Memory(kept + passing, weights + on_host, passing)


def sending_bytes(size: ModelSize, dtype: str, zero_stage: int, bucket_bytes: int) -> int:
    """Return what a push adds to its sender: two buckets, a gathered weight, and an adapted layer's float32 copies."""
    if not bucket_bytes:
        return 0
    largest = BYTES[dtype] * size.largest_weight
    merged = 6 * _FLOAT32 * size.largest_linear if size.adapters else 0
    return 2 * max(bucket_bytes, largest) + (largest if zero_stage == 3 else 0) + merged


def _head_bytes(size: ModelSize, on_gpus: bool) -> int:
    return 12 * _CHUNK_NUMBERS[on_gpus] + _FLOAT32 * _CHUNK_ROWS * size.hidden_size if size.hidden_size else 0


def _logits_bytes(size: ModelSize, settings: Settings) -> int:
    """Return the bytes of all logits of student and teacher, and of their divergence: measured as at most 49 each."""
    vocab_size = size.largest_weight // size.hidden_size if size.hidden_size else 0
    return 49 * vocab_size * _tokens(settings)


def _check_bytes(size: ModelSize) -> int:
    """Return the memory of the start's check: a model's first layer twice in float32, and three embeddings."""
    if not size.num_layers:
        return 0
    depth = size.num_layers if size.num_layers <= _FEW_LAYERS else 1
    of_layer = max(0, size.parameters - size.largest_weight) // size.num_layers
    return _FLOAT32 * (3 * size.largest_weight + 2 * depth * of_layer)


def activation_bytes(size: ModelSize, settings: Settings) -> int:
    """Return the bytes that a micro-batch keeps for the backward pass; 0 when the shape is unknown.

    With gradient checkpointing: each layer's input, and one layer's activations.
    """
    learner, width = settings.learner, BYTES[settings.policy.dtype]
    tokens = _tokens(settings)
    # Two norms keep their input in float32.
    in_layer = size.kept_in_layer * width + 2 * size.hidden_size * (_FLOAT32 - width)
    between = size.hidden_size * width
    if learner.gradient_checkpointing:
        return tokens * (size.num_layers * between + in_layer)
    return tokens * size.num_layers * in_layer


def _tokens(settings: Settings) -> int:
    """Return the tokens of the largest micro-batch. A longer trajectory is one of its own."""
    return max(settings.learner.micro_batch_tokens, settings.rollout.max_context_tokens)
