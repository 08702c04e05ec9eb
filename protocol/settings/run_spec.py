"""The description of a run for its rollout servers, and the request for an engine."""

import socket
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import Field

from protocol.errors import SettingsError
from protocol.node.identity import SERVER_ROOMS, code_digest
from protocol.node.small_model_files import read_small_files, small_files_digest
from protocol.settings.paths import user_files
from protocol.settings.rewards import RetrieverSettings, RewardsSettings
from protocol.settings.rollout import AgentsSettings, RolloutSettings, SamplingSettings
from protocol.settings.section import Section
from protocol.settings.settings import Settings
from protocol.settings.tools import ToolsSettings

# What a policy reads from services beside its prompt, by their names for the user.
TOOL_LIST, SEARCH_INDEX = "The list of the tools of tools.mcp", "The search index"


class RunSpec(Section):
    """A run's start. Keys, tokens and default addresses come from the server's node."""

    run_id: str
    incarnation: int  # number of the run's start, from 1
    coordinator_address: str  # tcp://HOST:PORT
    seed: int
    rollout: RolloutSettings
    sampling: SamplingSettings = SamplingSettings()
    tools: ToolsSettings = ToolsSettings()
    agents: AgentsSettings = AgentsSettings()
    retriever: RetrieverSettings  # url None: the retriever of the server's node
    shared_retrievers: tuple[str, ...] = ()  # retrievers of other nodes, while a node's own is down
    rewards: RewardsSettings  # no endpoints: the bundled service of the server's node
    code: dict[str, str] = Field({})  # digest of each of the user's files of the environment on the command's node

    def check_code(self) -> None:
        """Raise SettingsError for a file of the environment that is another one here, or was edited meanwhile.

        Samples of two environments would be trained as those of one.
        """
        here = digests_of(path for path in map(Path, self.code) if path.is_file())
        for path, digest in here.items():
            if digest != self.code[path]:
                raise SettingsError(
                    f"settings: rollout.environment: {path} on node {socket.gethostname()} is not the file with which "
                    "the command started: it was edited since, or this node has another copy. Copy the file to all "
                    "nodes and give the command again, or put the file back."
                )


class EngineRequest(Section):
    """The engine of a run. Runs with equal fingerprints can use the same warm server."""

    model: str  # model folder of the command's node
    dtype: Literal["float32", "bfloat16"]
    tensor_parallel_size: int  # GPUs of the engine
    seed: int  # vLLM's seed; each generation has its own
    max_model_len: int  # longest trajectory in tokens, prompt included
    trust_remote_code: bool  # code in the model folder may run
    weights_backend: Literal["nccl", "gloo", "ipc"]  # transport of pushes: nccl on GPUs, gloo on CPUs, ipc on both
    shares_device: bool = False  # its GPU is free while a rank trains there
    engine_args: dict[str, Any]  # vLLM's arguments, over our defaults
    on_cpus: bool = True
    second_copy: bool = True  # True: gloo fills a second copy; False: it replaces the weights in a pause
    code: str = ""  # digest of the server's code
    files_digest: str = ""  # hash of the model's small files; empty: `model` is on every node
    files: dict[str, bytes] = Field({})  # small files by name: shape, tokenizer, code

    def fingerprint(self) -> str:
        """Return a hash of the model's small files, every engine setting and the code, not of the weights.

        A push replaces the weights: another checkpoint of the same architecture can reuse a warm engine.
        """
        settings = self.model_dump(exclude={"model", "files"})
        return sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()

    def without_files(self) -> "EngineRequest":
        """Return the request for a server's process; its `start` gets the files.

        Ray keeps a process's arguments for restarts, and loses large ones with their sender.
        """
        return self.model_copy(update={"files": {}})


def digests_of(files: Iterable[Path]) -> dict[str, str]:
    """Return path -> digest of the content."""
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in files}


def run_spec(settings: Settings, run_id: str, incarnation: int, coordinator_address: str) -> RunSpec:
    """Return the description of this run's start."""
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
        code=digests_of(user_files(settings.rollout.environment)),
    )


def engine_request(
    settings: Settings,
    model: Path,
    weights_backend: Literal["nccl", "gloo", "ipc"],
    *,
    on_cpus: bool = True,
    shares_device: bool = False,
) -> EngineRequest:
    """Return the engine for a model folder of this node. Raises: OperatorError when small files are too large."""
    files = read_small_files(model, with_code=settings.policy.trust_remote_code)
    return EngineRequest(
        model=str(model),
        dtype=settings.policy.dtype,
        tensor_parallel_size=settings.rollout.tensor_parallel_size,
        seed=0,
        max_model_len=settings.rollout.max_context_tokens,
        trust_remote_code=settings.policy.trust_remote_code,
        weights_backend=weights_backend,
        on_cpus=on_cpus,
        # A server that sleeps during a push generates nothing.
        second_copy=weights_backend == "gloo" and settings.weights.second_copy is not False and not shares_device,
        shares_device=shares_device,
        engine_args=settings.rollout.engine_args,
        code=code_digest(SERVER_ROOMS),
        files_digest=small_files_digest(files),
        files=files,
    )
