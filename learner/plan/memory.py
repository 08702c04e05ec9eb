"""The memory of one learner rank's models, estimated without torch.

DeepSpeed 0.19, n trained and f frozen parameters over r ranks, types of b and 4 bytes:

    stage   weights        gradients   master weights, moments   gradient bucket   gathered
    0       (n + f) b      4 n         8 n                       -                 -
    1       (n + f) b      4 n         12 n / r                  b min(n, 0.5e9)   -
    2       (n + f) b      4 n / r     12 n / r                  b min(n, 0.5e9)   -
    3       (n + f) b / r  4 n / r     12 n / r                  b min(n, 0.5e9)   b min(n + f, 1e9)

Offloading keeps the gradients twice on the host, at stage 1 also on the device. Below stage 3 the host also holds a
second copy of the weights.
Source: ZeRO, arXiv:1910.02054, section 3; the last two columns, DeepSpeed's reduce_bucket_size and
stage3_max_live_parameters, or all experts of a layer, which are one weight.

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


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    device: int  # memory of its GPU, or of the host without one
    host: int = 0  # offloaded part on the host
    # largest temporary part of `device`: buckets, gathered weights, activations
    passing: int = field(default=0, compare=False)

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(self.device + other.device, self.host + other.host, self.passing + other.passing)


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


def rank_memory(settings: Settings, sizes: Sizes) -> Memory:
    """Return one rank's memory of policy, critic, reference and a micro-batch's activations."""
    learner, dtype = settings.learner, settings.policy.dtype
    policy, stage = sizes.policy, zero_stage_of(learner.zero_stage, settings.policy.dtype)
    if not is_trained(settings):
        return Memory((policy.parameters + policy.adapters) * BYTES[dtype] // (learner.num_ranks if stage == 3 else 1))
    total = trained_memory(policy, dtype, stage, learner.num_ranks, learner.offload)
    activations = activation_bytes(policy, settings)
    if needs_critic(settings):
        critic, (asked, offload) = sizes.critic or _without_adapters(policy), critic_zero(settings)
        total += trained_memory(critic, dtype, zero_stage_of(asked, dtype), learner.num_ranks, offload)
        activations = max(activations, activation_bytes(critic, settings))  # trained one after the other
    if needs_reference(settings) and not is_reference_the_base(settings):
        of_reference = (sizes.reference or policy).parameters * BYTES[dtype] // (learner.num_ranks if stage == 3 else 1)
        # An offloaded reference is on the device during use, with the policy.
        total += Memory(of_reference, of_reference if settings.reference.offload and stage != 3 else 0)
    return total + Memory(activations, passing=activations)


def loading_bytes(settings: Settings, sizes: Sizes) -> int:
    """Return the host memory of rank 0 while it reads its largest model, before the ranks divide it.

    The other ranks have weights without memory until they get their part.
    """
    models = [sizes.policy]
    models += [sizes.critic or sizes.policy] if needs_critic(settings) else []
    models += [sizes.reference or sizes.policy] if needs_reference(settings) else []
    return max(model.parameters for model in models) * BYTES[settings.policy.dtype]


def push_bytes(settings: Settings, size: ModelSize, bucket_bytes: int) -> int:
    """Return what a push adds to each of a server's GPUs.

    vLLM makes a second copy of the layer that it loads, and keeps what came of the layer until all of it has come:
    views of up to two buckets, and the experts' shards. bucket_bytes: 0 where buckets are in the host's memory.
    """
    width, num_workers = BYTES[settings.policy.dtype], settings.rollout.tensor_parallel_size
    largest, experts = width * size.largest_weight, width * 3 * size.stacked_experts // 2
    of_largest = max(bucket_bytes, largest if bucket_bytes else 0) + largest // num_workers
    return max(of_largest, 2 * bucket_bytes + 2 * experts // num_workers)


def trained_memory(size: ModelSize, dtype: str, zero_stage: int, num_ranks: int, offload: Offload) -> Memory:
    """Return one rank's memory of a trained model, without activations. zero_stage: the effective stage."""
    trained = size.adapters or size.parameters
    of_all = (size.parameters + size.adapters) * BYTES[dtype]
    if zero_stage == 0:
        return Memory(of_all + (_FLOAT32 + 8) * trained)
    weights = of_all // num_ranks if zero_stage == 3 else of_all
    gradients = _FLOAT32 * trained // (1 if zero_stage == 1 else num_ranks)
    optimizer = 12 * trained // num_ranks
    bucket = min(_MAX_BUCKET, trained) * BYTES[dtype]
    gathered = BYTES[dtype] * max(min(size.parameters + size.adapters, _MAX_GATHERED), size.stacked_experts)
    gathered = gathered if zero_stage == 3 else 0
    if offload == "none":
        return Memory(weights + gradients + optimizer + bucket + gathered, passing=bucket + gathered)
    again = 0 if zero_stage == 3 else BYTES[dtype] * trained // num_ranks
    on_host = optimizer + 2 * _FLOAT32 * trained // num_ranks + again
    if offload == "optimizer":
        kept = weights + (gradients if zero_stage == 1 else 0)
        return Memory(kept + bucket + gathered, on_host, bucket + gathered)
    return Memory(bucket + gathered, weights + on_host, bucket + gathered)


def activation_bytes(size: ModelSize, settings: Settings) -> int:
    """Return the bytes that a micro-batch keeps for the backward pass; 0 when the shape is unknown.

    With gradient checkpointing: each layer's input, and one layer's activations.
    """
    learner, width = settings.learner, BYTES[settings.policy.dtype]
    # A longer trajectory is a micro-batch of its own.
    tokens = max(learner.micro_batch_tokens, settings.rollout.max_context_tokens)
    # Two norms keep their input in float32.
    in_layer = size.kept_in_layer * width + 2 * size.hidden_size * (_FLOAT32 - width)
    between = size.hidden_size * width
    if learner.gradient_checkpointing:
        return tokens * (size.num_layers * between + in_layer)
    return tokens * size.num_layers * in_layer


def _without_adapters(size: ModelSize) -> ModelSize:
    return replace(size, adapters=0)
