"""Starts vLLM with our defaults under the user's engine arguments, and reports its refusals as our errors."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import NeighbourError, SettingsError
from protocol.node.home import sluice_home
from protocol.one_line import one_line
from protocol.settings.rollout import LOGPROBS_MODE
from protocol.settings.run_spec import EngineRequest
from rollout.engine.stop_strings import has_fast_tokenizer

BOUNDARY = "engine"
# Share of a GPU's memory for an engine that takes turns with a learner, whose CUDA context stays on the GPU.
_SHARED_GPU_PART = 0.8
_TURN_SCHEDULER = "rollout.engine.turn_scheduler.TurnScheduler"


def start_vllm(spec: EngineRequest) -> Any:
    """Return a vLLM `AsyncLLM` with dummy weights for `spec.model`; blocks for 10 to 30 s on a CPU.

    The first push brings the weights, so the model folder need not have them.

    Raises: SettingsError when vLLM refuses the settings, NeighbourError when its processes do not come up.
    """
    environment = vllm_environment(spec.model, spec.dtype, on_cpus=spec.on_cpus)
    if spec.on_cpus and spec.tensor_parallel_size == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    from vllm import AsyncEngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.vllm_plugin import engine_name, register

    register()
    try:
        args = AsyncEngineArgs(
            model=spec.model,
            dtype=spec.dtype,
            tensor_parallel_size=spec.tensor_parallel_size,
            seed=spec.seed,
            max_model_len=spec.max_model_len,
            trust_remote_code=spec.trust_remote_code,
            weight_transfer_config=WeightTransferConfig(backend=engine_name(spec.weights_backend, spec.second_copy)),
            **{**_default_engine_args(spec), **spec.engine_args},
        )
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)  # other contexts batch 128 sequences
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"settings: vLLM refuses the engine settings of {spec.model}: {one_line(error, 2000)}"
        ) from error
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
    except RuntimeError as error:
        raise NeighbourError(BOUNDARY, f"vLLM did not start for {spec.model}: {error}") from error


def ends_turns(llm: Any) -> bool:
    """Return whether this vLLM uses our scheduler with a tokenizer in which it can find stop strings."""
    is_ours = llm.vllm_config.scheduler_config.scheduler_cls == _TURN_SCHEDULER
    return is_ours and has_fast_tokenizer(llm.get_tokenizer())


def ends_of(llm: Any) -> frozenset[int]:
    """Return the tokens at which this vLLM ends a turn, by the model's generation_config.json or else config.json.

    It also ends a turn at the tokenizer's own end token.
    """
    given = llm.vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    return frozenset(given if isinstance(given, list) else [] if given is None else [given])


def limits_of(llm: Any) -> tuple[int, int | None, bool]:
    """Return the requests that this vLLM decodes at a time, the tokens whose keys and values it holds, and whether
    requests share those of equal beginnings.
    """
    config = llm.vllm_config
    cache = config.cache_config
    num_tokens = cache.num_gpu_blocks and cache.num_gpu_blocks * cache.block_size
    return config.scheduler_config.max_num_seqs, num_tokens, bool(cache.enable_prefix_caching)


def follow_tokens(llm: Any, on_tokens: Callable[[str, int], None]) -> None:
    """Call on_tokens(request id, number of new tokens) wherever vLLM's own counter of generation tokens rises.

    A streamed output would lose the tokens that were not consumed when its request was aborted.
    """
    processor = llm.output_processor
    process = processor.process_outputs

    def count_and_process(outputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        for output in outputs:
            state = processor.request_states.get(output.request_id)  # None: the request was aborted
            if state is not None and output.new_token_ids:
                on_tokens(state.external_req_id, len(output.new_token_ids))
        return process(outputs, *arguments, **options)

    processor.process_outputs = count_and_process


def vllm_environment(model: str, dtype: str = "auto", *, on_cpus: bool) -> dict[str, str]:
    """Return vLLM's environment variables for a model; those that the user set come before them."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1" if Path(model).is_dir() else "0",
        "TOKENIZERS_PARALLELISM": "false",
        # Containers often have no home folder, and would compile at every start.
        "VLLM_CACHE_ROOT": str(sluice_home() / "cache" / "vllm"),
        "TRITON_CACHE_DIR": str(sluice_home() / "cache" / "triton"),
        # Makes torch use pages of 2 MiB for large tensors: a push into new memory takes a quarter of the time.
        "THP_MEM_ALLOC_ENABLE": "1",
        # The same for other memory, such as oneDNN's packed weights. Read when a process starts.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    if dtype == "float32":
        # vLLM's attention for float32 on GPUs is Triton's, whose products have 10 bits by default: logprobs of the
        # trained quick start would differ from the learner's by more than the probe allows.
        environment["TRITON_F32_DEFAULT"] = "ieee"
    if on_cpus:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return environment


def _default_engine_args(spec: EngineRequest) -> dict[str, Any]:
    """Return our engine arguments, which a user's `engine_args` override."""
    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "worker_extension_cls": "rollout.engine.vllm_plugin.WorkerCalls",
        "logprobs_mode": LOGPROBS_MODE,
        "generation_config": "vllm",  # sampling defaults of a model folder must not change the training data
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if spec.shares_device and not spec.on_cpus:
        defaults |= {"enable_sleep_mode": True, "gpu_memory_utilization": _SHARED_GPU_PART}
    if spec.on_cpus:
        defaults |= {"enforce_eager": True, "max_num_seqs": 128}
        # Speculative decoding adds several tokens at once, and only vLLM's own search drops those after a stop string.
        if spec.engine_args.get("speculative_config") is None:
            defaults["scheduler_cls"] = _TURN_SCHEDULER
    return defaults
