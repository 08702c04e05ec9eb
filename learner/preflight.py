"""What is checked before anything starts: model, prompts, disk. A mistake is one sentence and leaves nothing behind.

Called by the driver (`learner.run`). Imports neither torch nor transformers unless prompts are chat messages.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from learner.prompts import Prompt, load_prompts
from learner.run_folder import RunStart, model_digest, plan_start
from protocol.errors import OperatorError, SettingsError
from protocol.settings import Settings

BYTES = {"float32": 4, "bfloat16": 2}
_WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class Inspected:
    """A run that passed every check made before anything starts. model: local folder. num_prompts: of data.train."""

    settings: Settings
    model: Path
    start: RunStart
    num_prompts: int


def inspect(settings: Settings) -> Inspected:
    """Return the run that these settings describe; starts nothing. Raises: SettingsError or OperatorError."""
    model = find_model(settings)
    check_warm_start(settings)
    start = plan_start(settings.run, model_digest(model))
    train = load_prompts(settings.data.train, settings.data)
    check_prompt_lengths(train, settings.data.train, model, settings)
    if settings.data.eval:
        check_prompt_lengths(load_prompts(settings.data.eval, settings.data), settings.data.eval, model, settings)
    check_disk(start.folder, model, settings.policy.dtype, settings.learner.keep_checkpoints)
    return Inspected(settings, model, start, len(train))


def find_model(settings: Settings) -> Path:
    """Return the local folder of policy.model, fetched from the Hugging Face hub when it is a name.

    Raises: SettingsError when it is neither a model folder nor a name in reach.
    """
    name = settings.policy.model
    if not name:
        raise SettingsError("settings: policy.model is not set. Give a model folder or a Hugging Face name.")
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:  # no name on the hub looks like this
            raise SettingsError(f"settings: policy.model = {name} is not a folder. Give one that holds a model.")
        folder = _fetch(name)
    _check_model(folder, name)
    return folder.resolve()


def check_warm_start(settings: Settings) -> None:
    """Raise SettingsError when the demonstrations are not there; their rows are read when the warm start begins."""
    path = settings.policy.warm_start.data
    if path is not None and not Path(path).is_file():
        raise SettingsError(
            f"settings: policy.warm_start.data = {path} does not exist. Give a JSONL file, or null for no warm start."
        )


def check_prompt_lengths(prompts: Sequence[Prompt], path: str, model: Path, settings: Settings) -> None:
    """Raise SettingsError for the first prompt without tokens, or without room for the policy after it."""
    room = settings.rollout.max_context_tokens - settings.rollout.max_response_tokens
    for number, length in enumerate(_lengths(prompts, model, settings.policy.trust_remote_code), start=1):
        if not length:
            raise SettingsError(f"data: prompt {number} of {path} has no tokens for the tokenizer of policy.model.")
        if length > room:
            raise SettingsError(
                f"data: prompt {number} of {path} has {length} tokens; rollout.max_context_tokens = "
                f"{settings.rollout.max_context_tokens} less rollout.max_response_tokens = "
                f"{settings.rollout.max_response_tokens} leaves {room}. Raise the first, or shorten the prompt."
            )


def check_disk(folder: Path, model: Path, dtype: str, num_checkpoints: int) -> None:
    """Raise OperatorError when the disk cannot hold the run's checkpoints, or the folder cannot be written."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        # Tried, not read from permissions: root has them all, on a read-only disk too.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OperatorError(
            f"{existing} cannot be written: {error.strerror}. Set run.dir to a folder of your own."
        ) from None
    # Master weights and two AdamW moments in float32 and the model as it is served, for each kept checkpoint and the
    # one being written.
    needed = (num_checkpoints + 1) * count_parameters(model) * (12 + BYTES[dtype]) + (64 << 20)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OperatorError(
            f"{existing} has {free >> 20} MiB free; this run's checkpoints need about {needed >> 20} MiB. "
            "Free some, set run.dir to a larger disk, or lower learner.keep_checkpoints."
        )


def count_parameters(model: Path) -> int:
    """Return the number of parameters in a model folder: from the headers of its safetensors files; for one without
    such files, as many as its files may hold at 2 bytes each.
    """
    stored = sorted(model.glob("*.safetensors"))
    if not stored:
        return sum(path.stat().st_size // 2 for path in model.glob("*.bin"))
    total = 0
    for path in stored:
        with safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):  # safe_open is no mapping
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise SettingsError(
            f"settings: policy.model = {name} is neither a folder nor a model in reach of the Hugging Face hub "
            f"({type(error).__name__}). Give a model folder."
        ) from None


def _check_model(folder: Path, name: str) -> None:
    """Raise SettingsError for a folder that is no whole model; reads the headers of its weights, not the weights."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise SettingsError(
            f"settings: policy.model = {name} has no config.json. Give a Hugging Face model folder."
        ) from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"settings: policy.model = {name}: its config.json is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise SettingsError(f"settings: policy.model = {name}: its config.json is no JSON object.")
    weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    if not weights:
        raise SettingsError(f"settings: policy.model = {name} holds no weights (*.safetensors). Give a complete model.")
    if not any(path.name.startswith(("tokenizer", "vocab")) or path.suffix == ".model" for path in folder.iterdir()):
        # Asked for it, transformers would give an empty tokenizer of this kind of model: every text becomes no token.
        raise SettingsError(f"settings: policy.model = {name} has no tokenizer. Give a complete model.")
    for path in weights:
        if path.suffix == ".safetensors":
            _check_weights(path)


def _check_weights(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise SettingsError(
            f"settings: policy.model: {path} cannot be read ({error}). Copy or download the model again."
        ) from None


def _lengths(prompts: Sequence[Prompt], model: Path, trust_remote_code: bool) -> list[int]:
    """Return each prompt's number of tokens. Raises: SettingsError when the model's tokenizer cannot encode them."""
    try:
        return _count_tokens(prompts, model, trust_remote_code)
    except Exception as error:  # tokenizers raise Exception itself, and templates whatever jinja does
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(
            f"settings: the tokenizer of policy.model = {model} cannot encode the prompts: {reason[:300]}"
        ) from error


def _count_tokens(prompts: Sequence[Prompt], model: Path, trust_remote_code: bool) -> list[int]:
    if all(isinstance(prompt.prompt, str) for prompt in prompts) and (model / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        return [len(encoding.ids) for encoding in tokenizer.encode_batch([str(prompt.prompt) for prompt in prompts])]
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    return [
        len(slow.encode(p.prompt))
        if isinstance(p.prompt, str)
        else len(slow.apply_chat_template(p.prompt, add_generation_prompt=True)["input_ids"])
        for p in prompts
    ]
