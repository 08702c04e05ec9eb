"""`--plan`: which process goes where, with how many GPUs and what it will cost in memory, without starting anything."""

from rich.console import Console
from rich.table import Table

from learner.disk.model_folder import BYTES, count_parameters
from learner.run.preflight import Inspected


def show_plan(inspected: Inspected) -> None:
    """Print the plan as a table."""
    settings, start = inspected.settings, inspected.start
    learner, rollout = settings.learner, settings.rollout
    parameters = count_parameters(inspected.model)
    table = Table("process", "how many", "GPUs each", "memory each", "where", title=f"Run {start.run_id}")
    table.add_row("coordinator", "1", "0", f"{_mib(_window_bytes(inspected))} for the window", "this node")
    rank_bytes = learner_bytes(parameters, settings.policy.dtype, learner.zero_stage, learner.num_ranks)
    table.add_row(
        "learner rank", str(learner.num_ranks), "1 (0 without GPUs)", f"{_mib(rank_bytes)} + activations", "packed"
    )
    engine_bytes = parameters * BYTES[settings.policy.dtype] // rollout.tensor_parallel_size
    table.add_row(
        "rollout server",
        str(rollout.num_servers),
        f"{rollout.tensor_parallel_size} (0 without GPUs)",
        f"{_mib(engine_bytes)} + KV cache",
        "spread",
    )
    console = Console()
    console.print(table)
    console.print(
        f"{parameters:,} parameters; {inspected.num_prompts:,} prompts; "
        f"steps {start.step + 1} to {settings.run.max_steps} of {learner.groups_per_step} groups x "
        f"{rollout.group_size} samples; at most {(learner.max_staleness + 1) * learner.groups_per_step} groups out "
        f"at a time; run folder {start.folder}."
    )
    if start.notice:
        console.print(start.notice)


def learner_bytes(parameters: int, dtype: str, zero_stage: int, num_ranks: int) -> int:
    """Return the bytes of weights, gradients and AdamW state on one rank (bf16 keeps an fp32 copy).

    Source: ZeRO, arXiv:1910.02054, section 3: stage 2 splits optimizer state and gradients, stage 3 the weights too.
    """
    weights = gradients = parameters * BYTES[dtype]
    optimizer = parameters * (8 if dtype == "float32" else 12)
    if zero_stage >= 2:
        gradients, optimizer = gradients // num_ranks, optimizer // num_ranks
    if zero_stage == 3:
        weights //= num_ranks
    return weights + gradients + optimizer


def _window_bytes(inspected: Inspected) -> int:
    """9 bytes a token: id, logprob and mask; at most the whole context for every sample in the window."""
    settings = inspected.settings
    groups = (settings.learner.max_staleness + 1) * settings.learner.groups_per_step
    return groups * settings.rollout.group_size * settings.rollout.max_context_tokens * 9


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
