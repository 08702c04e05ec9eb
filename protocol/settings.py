"""Every setting of a run, one section per room, with its unit, range and meaning.

Read by all rooms; loaded by `protocol.settings_loader`. Names follow the command line: `--learner.max_staleness 1`.
Cross-field checks live in `Settings` itself, so that a wrong combination is refused before anything starts.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    HttpUrl,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.types import NonNegativeFloat, NonNegativeInt


def _number_of_text(value: Any) -> Any:
    """Return the number that a command line's text stands for: a choice of numbers would refuse "2" for 2."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _without_secrets(url: HttpUrl) -> HttpUrl:
    """Raise ValueError for a URL with a user or password: URLs are in settings.yaml, logs and error messages."""
    if url.username or url.password:
        raise ValueError("holds a user or password, which would be in settings.yaml and logs. Use headers_env.")
    return url


ServiceUrl = Annotated[HttpUrl, AfterValidator(_without_secrets)]
ZeroStage = Annotated[Literal[0, 2, 3], BeforeValidator(_number_of_text)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the settings: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSettings(Section):
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Folder name of the run under run.dir."
    )
    dir: str = Field("runs", description="Folder that holds the runs.")
    seed: NonNegativeInt = Field(1, description="Seeds the order of prompts, sampling and initialisation.")
    max_steps: NonNegativeInt = Field(100, description="Optimizer steps after which the run ends by itself.")
    resume: str = Field(
        "auto",
        description="auto: this run's newest valid checkpoint; never: refuse a used folder; or a checkpoint's path.",
    )
    max_restarts: NonNegativeInt = Field(
        3, description="Restarts after a death without a step that was not reached before; 0: the run ends."
    )
    drain_s: PositiveFloat = Field(
        20.0, description="Longest time from Ctrl-C or SIGTERM until the last checkpoint is written."
    )


class WarmStartSettings(Section):
    """Supervised fine-tuning of the policy before the first step, cached by the content of model, data and settings."""

    data: str | None = Field(
        None, description="JSONL of messages, prompt + response, or weighted segments; null: no warm start."
    )
    max_steps: PositiveInt = Field(1000, description="Optimizer steps; rows are taken in file order.")
    rows_per_step: PositiveInt = Field(64, description="Rows in one step.")
    lr: PositiveFloat = Field(2e-3, description="Peak learning rate.")
    lr_warmup_steps: NonNegativeInt = Field(50, description="Steps of linear warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak (linear decay).")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.98), description="AdamW betas.")


class PolicySection(Section):
    model: str = Field("", description="Model folder or Hugging Face name of the policy.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type of the weights in learner and engine.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless you trust it."
    )
    old_logprobs: Literal["behaviour", "recompute"] = Field(
        "behaviour",
        description="Old logprobs of the clipped ratio: the engine's, or the learner's before its step.",
    )
    warm_start: WarmStartSettings = Field(
        WarmStartSettings(), description="Supervised fine-tuning before the first step."
    )


class DataSettings(Section):
    train: str = Field("", description="JSONL or Parquet of training prompts.")
    eval: str | None = Field(None, description="JSONL or Parquet of held-out prompts; null: no evaluation.")
    prompt_key: str = Field("prompt", description="Column that holds the prompt (string or chat messages).")
    label_key: str = Field("label", description="Column that holds the label handed to the reward services.")
    label_required: bool = Field(True, description="Refuse rows without a label.")


class RolloutSettings(Section):
    num_servers: PositiveInt = Field(1, description="vLLM servers.")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs of one server.")
    group_size: PositiveInt = Field(8, le=4096, description="Samples of one prompt.")
    environment: str = Field("single_turn", description="single_turn, search, module:Class or FILE.py:Class.")
    max_turns: PositiveInt = Field(4, description="Turns in which the policy may search before its last generation.")
    max_response_tokens: PositiveInt = Field(500, description="Tokens the policy may write in one turn.")
    max_observation_tokens: PositiveInt = Field(
        500, description="Tokens of one reply of the environment; longer ones are cut."
    )
    max_context_tokens: PositiveInt = Field(4096, description="Tokens of a whole trajectory, prompt included.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    max_groups_in_flight: PositiveInt = Field(64, description="Groups that one server works on at a time.")
    turn_timeout_s: PositiveFloat = Field(600.0, description="Longest wait for one generation.")
    lease_timeout_s: PositiveFloat = Field(
        1800.0, description="Longest life of a lease before its prompt goes out again."
    )
    start_timeout_s: PositiveFloat = Field(600.0, description="Longest wait for the servers to start.")
    engine_args: dict[str, Any] = Field({}, description="Passed to vLLM's AsyncEngineArgs unchanged.")


class RetrieverSettings(Section):
    url: ServiceUrl | None = Field(None, description="POST /retrieve address; null: each node's own retriever.")
    topk: PositiveInt = Field(3, description="Passages of one search.")


class RewardEndpoint(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="Name of this reward's part on a trajectory.")
    url: ServiceUrl = Field(description="POST address, used exactly as given.")
    weight: float = Field(1.0, allow_inf_nan=False, description="Factor of this part when parts are combined.")
    timeout_s: PositiveFloat = Field(60.0, description="Longest wait for one attempt.")
    max_concurrency: PositiveInt = Field(64, description="Requests in flight to this endpoint from one server.")
    headers_env: dict[str, str] = Field({}, description="HTTP header -> environment variable that holds its value.")
    batch_size: PositiveInt = Field(1, description="Samples sent in one request.")


class RewardsSettings(Section):
    endpoints: list[RewardEndpoint] = Field(
        [], max_length=64, description="Reward services; empty: the bundled one of this cluster."
    )
    combine: Literal["sum", "mean", "product", "shard"] = Field(
        "sum", description="How the endpoints' parts become one reward."
    )


class LearnerSettings(Section):
    num_ranks: PositiveInt = Field(1, description="DeepSpeed ranks.")
    zero_stage: ZeroStage = Field(0, description="DeepSpeed ZeRO stage.")
    groups_per_step: PositiveInt = Field(32, description="Prompts whose groups make one optimizer step.")
    max_staleness: NonNegativeInt = Field(
        1, description="Optimizer steps a trained token may lag behind; 0 is synchronous."
    )
    stale_policy: Literal["wait", "drop"] = Field("wait", description="What happens to a group about to grow too old.")
    equal_groups: Literal["keep", "skip"] = Field(
        "keep", description="skip: groups whose rewards are all equal take no part in the loss."
    )
    lr: PositiveFloat = Field(1e-6, description="Peak learning rate.")
    lr_warmup_steps: NonNegativeInt = Field(0, description="Steps of linear warm-up.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Decay after the warm-up.")
    min_lr_ratio: Fraction = Field(0.1, description="Last learning rate over the peak.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW weight decay.")
    max_grad_norm: PositiveFloat = Field(1.0, description="Gradients are clipped to this global norm.")
    micro_batch_tokens: PositiveInt = Field(
        8192, description="Token budget of one forward and backward pass on one rank."
    )
    gradient_checkpointing: bool = Field(False, description="Trade compute for memory in the backward pass.")
    recipe: Literal["grpo", "dr_grpo", "rloo"] = Field(
        "grpo", description="Names an advantage, loss and correction that belong together."
    )
    advantage: Literal["grpo", "dr_grpo", "rloo"] | None = Field(None, description="null: the recipe's.")
    loss: Literal["ppo", "reinforce"] | None = Field(None, description="null: the recipe's.")
    correction: Literal["none", "tis", "icepop"] | None = Field(None, description="null: the recipe's.")
    clip_low: PositiveFloat = Field(0.2, description="Ratio is clipped below 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.2, description="Ratio is clipped above 1 + clip_high.")
    checkpoint_every_steps: NonNegativeInt = Field(50, description="Steps between checkpoints; 0: only the last one.")
    keep_checkpoints: Annotated[int, Field(ge=2)] = Field(2, description="Valid checkpoints kept on disk.")
    num_threads: NonNegativeInt = Field(
        0, description="CPU threads of one rank; 0: its share of the cores, less one for each rollout server."
    )
    batch_timeout_s: PositiveFloat = Field(1800.0, description="Longest wait of a rank for its next batch.")
    deepspeed: dict[str, Any] = Field({}, description="Merged into DeepSpeed's own configuration.")


class WeightsSettings(Section):
    backend: Literal["auto", "nccl", "ipc", "gloo"] = Field("auto", description="auto: nccl with GPUs, gloo without.")
    bucket_mb: PositiveInt = Field(256, description="Size of one bucket of weights on the wire, MiB.")
    deadline_s: PositiveFloat = Field(120.0, description="Longest wait for any one state of a push.")
    probe: bool = Field(
        True, description="After each push compare logprobs of a fixed text between learner and server."
    )
    probe_tolerance: PositiveFloat | None = Field(
        None, description="Largest accepted difference, nats; null: 0.001 in float32, 0.5 in bfloat16."
    )


class EvalSettings(Section):
    every_steps: NonNegativeInt = Field(
        0, description="Steps between evaluations; 0: none. With any, also before the first and after the last step."
    )
    num_prompts: PositiveInt = Field(
        256, description="Held-out prompts of one evaluation (the first ones of data.eval)."
    )
    samples: PositiveInt = Field(
        1, le=4095, description="Samples of a prompt at rollout.temperature; one greedy sample is added."
    )


class ReportSettings(Section):
    wandb_project: str | None = Field(None, description="Weights & Biases project; WANDB_MODE=offline works.")
    samples_per_step: NonNegativeInt = Field(1, description="Trajectories per step kept readable for report.html.")


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    policy: PolicySection = PolicySection()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    retriever: RetrieverSettings = RetrieverSettings()
    rewards: RewardsSettings = RewardsSettings()
    learner: LearnerSettings = LearnerSettings()
    weights: WeightsSettings = WeightsSettings()
    eval: EvalSettings = EvalSettings()
    report: ReportSettings = ReportSettings()

    @model_validator(mode="after")
    def _check_across_fields(self) -> Self:
        learner, rollout, rewards = self.learner, self.rollout, self.rewards
        if learner.groups_per_step % learner.num_ranks:
            divisors = [n for n in range(1, learner.groups_per_step + 1) if learner.groups_per_step % n == 0]
            raise ValueError(
                f"learner.groups_per_step = {learner.groups_per_step} cannot be split over {learner.num_ranks} ranks. "
                f"Use a multiple of {learner.num_ranks}, or set learner.num_ranks to one of {divisors}."
            )
        if rollout.group_size < 2 and (learner.advantage or learner.recipe) in ("grpo", "rloo", "dr_grpo"):
            raise ValueError(
                f"rollout.group_size = {rollout.group_size} gives a group nothing to be compared with. "
                "Use at least 2 samples of a prompt."
            )
        if rollout.max_response_tokens >= rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_response_tokens = {rollout.max_response_tokens} leaves no room for a prompt in "
                f"rollout.max_context_tokens = {rollout.max_context_tokens}. Lower the first or raise the second."
            )
        names = [endpoint.name for endpoint in rewards.endpoints]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards.endpoints has the names {names}. Give each endpoint a name of its own.")
        if self.eval.every_steps and not self.data.eval:
            raise ValueError(
                f"eval.every_steps = {self.eval.every_steps} needs held-out prompts. "
                "Set data.eval, or eval.every_steps to 0."
            )
        return self
