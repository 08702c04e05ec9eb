"""What a vLLM engine is started with, and when a warm one may be taken over instead. Plain data: no vLLM here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

_DESCRIPTION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is started with. Two specs with one `fingerprint` can share a warm engine."""

    model: str  # path of a local model folder
    dtype: str  # of the weights: float32 or bfloat16
    tensor_parallel_size: int  # GPUs of the engine
    seed: int  # vLLM's own; each generation comes with one besides
    max_model_len: int  # tokens of the longest trajectory, prompt included
    trust_remote_code: bool  # True: code in the model folder may run
    weights_backend: str  # how pushes come: gloo (CPU) or nccl (GPU)
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # for vLLM unchanged, over our defaults
    code: str = ""  # digest of the code that serves it (`protocol.node.code_digest`)

    def fingerprint(self) -> str:
        """Return a hash of the model's shape and tokenizer, every engine setting and the code, not of the weights.

        Weights are left out because a push replaces them: a run that trains another checkpoint of the same
        architecture can take over a warm engine.
        """
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "model"}
        settings["engine_args"] = dict(self.engine_args)
        digest = sha256(msgspec.json.encode(settings, order="deterministic"))
        folder = Path(self.model)
        if not folder.is_dir():
            digest.update(self.model.encode())
            return digest.hexdigest()
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in _DESCRIPTION_SUFFIXES and not path.name.endswith(".index.json"):
                digest.update(path.name.encode() + b"\0" + sha256(path.read_bytes()).digest())
        return digest.hexdigest()
