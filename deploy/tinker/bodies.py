"""The JSON bodies of Tinker's API that this service reads. Unknown keys are ignored, as the hosted service does."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Any body."""

    model_config = ConfigDict(protected_namespaces=(), allow_inf_nan=False)


class SessionBody(Body):
    session_id: str


class LoraConfig(Body):
    rank: int = Field(ge=1)
    seed: int | None = None  # None: the service draws one
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: str = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelBody(Body):
    model_id: str


class Head(ModelBody):
    """What the requests of a model share. The rest of a body is read in its turn, so that an error takes its place."""

    seq_id: int


class FirstBody(Body):
    """What create_model and load_weights share when they make a model."""

    user_metadata: dict[str, str] | None = None


class WeightsInfo(Body):
    tinker_path: str


class AdamParams(Body):
    learning_rate: float = Field(0.0001, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)  # 0 would divide by zero where a gradient is zero
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = 0.0  # 0: no clipping


class OptimStep(Body):
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None  # of another optimizer, which is refused


class SaveWeights(Body):
    path: str  # name of the checkpoint
    overwrite: bool = False


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None  # an existing model, with seq_id
    seq_id: int | None = None
    session_id: str | None = None  # a new model, with model_seq_id
    model_seq_id: int | None = None
    base_model: str | None = None


class SaveForSampler(Body):
    path: str | None = None  # name of the weights; None: they are for one sampling session
    sampling_session_seq_id: int | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Body):
    type: str
    tokens: list[int] = []


class Prompt(Body):
    chunks: list[Chunk]


class SamplingParams(Body):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None  # besides the end of text; an empty list: nothing stops
    temperature: float = Field(1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(Body):
    sampling_session_id: str
    seq_id: int
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    num_samples: int = Field(1, ge=1)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)  # the earlier tokens of the prompt get no logprob
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: dict[str, Any] | None = None  # refused
    prompt_alt_tokens_k: int = 0  # refused above 0


class RetrieveFuture(Body):
    request_id: str
