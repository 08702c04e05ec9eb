"""`sluice tinker MODEL`: train and sample with the tinker client on this machine."""

import argparse
import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.disk.lock import file_lock
from protocol.errors import OperatorError, SettingsError
from protocol.http.listen import LOOPBACK, bind, positive
from protocol.http.service import run_service, serve_app

if TYPE_CHECKING:
    from deploy.tinker.adapters import BaseModel
    from protocol.settings.run_spec import EngineRequest

_ABOUT = """\
Serve Tinker's API for one base model, on CPUs or one GPU. Clients train LoRA adapters. Give them
TINKER_BASE_URL=http://HOST:PORT and a TINKER_API_KEY that begins with tml-. The same --folder resumes after a crash."""
_MIN_KEY_LENGTH = 16
_USUAL_TOKENS = 4096
_ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the largest ranks that vLLM can be started with


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    return run_service(_parser(), arguments, _serve)


def _serve(given: argparse.Namespace) -> None:
    key = _read_key(given.key_file) if given.key_file else None
    if given.max_rank > _ENGINE_RANKS[-1]:
        raise OperatorError(f"tinker: --max-rank {given.max_rank} is over {_ENGINE_RANKS[-1]}, the most that vLLM has.")
    if key is None and given.host not in LOOPBACK:
        raise OperatorError(
            f"tinker: --host {given.host} is open to other machines. Give --key-file, or use 127.0.0.1."
        )
    listener = bind("tinker", given.host, given.port)
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        with listener, file_lock(given.folder / "lock"):
            serve_app(_make_app(given, key), listener, None, f"tinker: {', '.join(given.name or [given.model])}")
    except BlockingIOError:
        raise OperatorError(f"tinker: {given.folder} is used by another service. Give another --folder.") from None


def _make_app(given: argparse.Namespace, key: str | None) -> Any:
    """Return the application with the base model loaded."""
    from deploy.tinker.adapters import BaseModel, base_settings
    from deploy.tinker.app import About, Api
    from deploy.tinker.journal import Journal
    from deploy.tinker.learning import Learning, Limits
    from deploy.tinker.sampling import Sampling
    from learner.disk.model_folder import find_named_model, read_max_positions

    model = find_named_model("MODEL", given.model)
    most = read_max_positions(model) or given.max_tokens or _USUAL_TOKENS
    max_tokens = given.max_tokens or min(_USUAL_TOKENS, most)
    if max_tokens > most:
        raise OperatorError(f"tinker: --max-tokens {max_tokens} is over the {most} positions of {model}. Give {most}.")
    _check_base(given.folder, model)
    same = {name: getattr(given, name) for name in ("dtype", "gradient_checkpointing", "trust_remote_code")}
    base = BaseModel(base_settings(model, max_tokens, given.micro_batch_tokens, **same))
    journal = Journal(given.folder / "journal.sqlite")
    (given.folder / "weights").mkdir(exist_ok=True)
    arch = json.loads((model / "config.json").read_bytes()).get("model_type", "unknown")
    names = tuple(given.name or [given.model])
    api = Api(journal, About(names, str(model), arch, max_tokens), key)
    limits = Limits(int(given.adapter_gib * 2**30), given.max_rank, (*names, str(model)))
    engine = _engine_of(given, model, max_tokens, base)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        learning = Learning(journal, base, given.folder, limits, api.on_result)
        sampling = Sampling(journal, engine, given.folder, api.on_result)
        api.start(learning, sampling)
        threading.Thread(target=learning.run, name="learning", daemon=True).start()
        yield
        await asyncio.to_thread(sampling.close)

    return api.app(lifespan)


def _engine_of(given: argparse.Namespace, model: Path, max_tokens: int, base: "BaseModel") -> "EngineRequest":
    """Return the form of vLLM's engine, whose adapters may have any rank up to --max-rank."""
    from protocol.settings.run_spec import EngineRequest

    on_cpus = base.device.type == "cpu"
    engine_rank = next(rank for rank in _ENGINE_RANKS if rank >= given.max_rank)
    lora = {"enable_lora": True, "max_lora_rank": engine_rank, "max_loras": 8, "load_format": "auto"}
    # No adapter has a head. On CPUs vLLM's adapted head ends the engine when several prompts are scored at a time.
    lora["lora_target_modules"] = base.layer_kinds
    return EngineRequest(
        model=str(model),
        dtype=given.dtype,
        tensor_parallel_size=1,
        seed=0,
        max_model_len=max_tokens,
        trust_remote_code=given.trust_remote_code,
        weights_backend="gloo" if on_cpus else "nccl",
        engine_args={**lora, **given.engine_args},
        on_cpus=on_cpus,
    )


def _check_base(folder: Path, model: Path) -> None:
    """Write down the base model of a folder. Raises: OperatorError when the folder has the weights of another one."""
    from learner.disk.model_folder import shape_digest, weights_digest
    from protocol.disk.files import replace_file

    record, digest = folder / "base_model", f"{shape_digest(model, with_code=False)} {weights_digest(model)}"
    if not record.exists():
        replace_file(record, digest.encode())
    elif record.read_text() != digest:
        raise OperatorError(
            f"tinker: {folder} has clients' weights for another base model than {model}. Give another --folder."
        )


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"tinker: --key-file {path} cannot be read ({error}). Give a file with a key.") from None
    if len(key) < _MIN_KEY_LENGTH or not key.startswith("tml-"):
        raise OperatorError(
            f"tinker: --key-file {path} needs a key of {_MIN_KEY_LENGTH} characters that begins with tml-."
        )
    return key


def _engine_args(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SettingsError(
            f"tinker: --engine-args {text} is no JSON object. Give one, such as '{{\"max_loras\": 16}}'."
        )
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice tinker", description=_ABOUT)
    parser.add_argument("model", metavar="MODEL", help="model folder, or its name on the Hugging Face hub")
    parser.add_argument(
        "--name",
        action="append",
        help="name of the base model for clients, such as Qwen/Qwen3-8B (default: MODEL); again: one more name",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/tinker"),
        help="journal, states and saved weights (default: runs/tinker)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than 127.0.0.1 need a key")
    parser.add_argument("--port", type=int, default=8010, help="port to listen on; 0: a free one")
    parser.add_argument("--key-file", type=Path, help="require the key in this file, which begins with tml-")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="type of the base model")
    parser.add_argument("--max-tokens", type=positive, help="longest text (default: the model's, at most 4096)")
    parser.add_argument("--max-rank", type=positive, default=64, help="largest rank of an adapter (default: 64)")
    parser.add_argument(
        "--adapter-gib", type=float, default=2.0, help="memory of all adapters in training (default: 2)"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=positive, default=8192, help="tokens of one forward pass (default: 8192)"
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory for long texts, slower")
    parser.add_argument("--engine-args", type=_engine_args, default={}, metavar="JSON", help="arguments of vLLM")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the model folder")
    return parser
