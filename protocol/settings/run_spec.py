"""What a rollout server is told when a run attaches to it, and how an engine is asked for."""

from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from protocol.node.code_digest import SERVER_ROOMS, code_digest
from protocol.node.model_files import ModelFiles, description_digest
from protocol.settings.retriever import RetrieverSettings
from protocol.settings.rewards import RewardsSettings
from protocol.settings.rollout import AgentsSettings, RolloutSettings, SamplingSettings
from protocol.settings.section import Section
from protocol.settings.settings import Settings
from protocol.settings.tools.offered import ToolsSettings


class RunSpec(Section):
    """One run's start, as a rollout server needs to know it. Keys, tokens and default addresses are its node's own."""

    run_id: str  # the run's name
    incarnation: int  # which start of the run this is, from 1
    coordinator_address: str  # tcp://HOST:PORT
    seed: int  # run.seed
    rollout: RolloutSettings  # of the run's settings
    sampling: SamplingSettings = SamplingSettings()  # of the run's settings
    tools: ToolsSettings = ToolsSettings()  # of the run's settings
    agents: AgentsSettings = AgentsSettings()  # of the run's settings
    retriever: RetrieverSettings  # of the run's settings; url None: the retriever of the server's node
    shared_retrievers: tuple[str, ...] = ()  # those of the servers' nodes: asked where a node's own is down
    rewards: RewardsSettings  # of the run's settings; no endpoints: the bundled one of the server's node


class EngineRequest(Section):
    """The engine a run wants. Two runs whose requests have one `fingerprint` may use the same warm server."""

    model: str  # path of a local model folder
    dtype: Literal["float32", "bfloat16"]  # of the weights
    tensor_parallel_size: int  # GPUs of the engine
    seed: int  # vLLM's own; each generation comes with one besides
    max_model_len: int  # tokens of the longest trajectory, prompt included
    trust_remote_code: bool  # True: code in the model folder may run
    weights_backend: Literal["nccl", "gloo", "ipc"]  # how pushes come: nccl and ipc on GPUs, gloo and ipc on CPUs
    shares_device: bool = False  # True: it gives its GPU up while a learner rank trains there
    engine_args: dict[str, Any]  # for vLLM unchanged, over our defaults
    on_cpus: bool = True  # True: the cluster has no GPU
    second_copy: bool = True  # True, over gloo: pushes come beside the weights in use; False: into them, in a pause
    code: str = ""  # digest of the code that the server is to run
    description: str = ""  # digest of the model's shape and tokenizer; empty: that of the folder, which is here then
    files: ModelFiles | None = None  # what the folder holds, and which node has it; None: every node has it

    def fingerprint(self) -> str:
        """Return a hash of the model's shape and tokenizer, every engine setting and the code, not of the weights.

        Weights are left out because a push replaces them: a run that trains another checkpoint of the same
        architecture can take over a warm engine.
        """
        settings = self.model_dump(exclude={"model", "description", "files"})
        digest = sha256(msgspec.json.encode(settings, order="deterministic"))
        digest.update((self.description or _description(self.model)).encode())
        return digest.hexdigest()


def run_spec(settings: Settings, run_id: str, incarnation: int, coordinator_address: str) -> RunSpec:
    """Return the description of this run's start that its rollout servers get."""
    return RunSpec(
        run_id=run_id,
        incarnation=incarnation,
        coordinator_address=coordinator_address,
        seed=settings.run.seed,
        rollout=settings.rollout,
        sampling=settings.sampling,
        tools=settings.tools,
        agents=settings.agents,
        retriever=settings.retriever,
        rewards=settings.rewards,
    )


def engine_request(
    settings: Settings,
    model: str,
    weights_backend: Literal["nccl", "gloo", "ipc"],
    files: ModelFiles | None = None,
    *,
    on_cpus: bool = True,
    shares_device: bool = False,
) -> EngineRequest:
    """Return the engine for a local model folder. files: what it holds, for nodes that lack it."""
    return EngineRequest(
        model=model,
        dtype=settings.policy.dtype,
        tensor_parallel_size=settings.rollout.tensor_parallel_size,
        seed=0,
        max_model_len=settings.rollout.max_context_tokens,
        trust_remote_code=settings.policy.trust_remote_code,
        weights_backend=weights_backend,
        on_cpus=on_cpus,
        # One that sleeps during a push writes nothing meanwhile, so that a second copy is of no use.
        second_copy=weights_backend == "gloo" and settings.weights.second_copy is not False and not shares_device,
        shares_device=shares_device,
        engine_args=settings.rollout.engine_args,
        code=code_digest(SERVER_ROOMS),
        description=_description(model),
        files=files,
    )


def _description(model: str) -> str:
    folder = Path(model)
    return description_digest(folder) if folder.is_dir() else model
