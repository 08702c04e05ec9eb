"""A Hugging Face model folder, read without loading the model: completeness, vocabulary, shape and size."""

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from learner.disk.run_folder import CHECKPOINTS
from protocol.errors import SettingsError
from protocol.node.small_model_files import GENERATION, end_tokens, read_small_files, small_files_digest
from protocol.settings.policy import LoraSettings
from protocol.settings.settings import Settings


def read_vocab_size(model: Path) -> int | None:
    """Return the embedding's rows from config.json; None when it has no vocab_size.

    Raises: SettingsError for a vocab_size that is not a positive number.
    """
    for part in _configs(model):
        if (size := part.get("vocab_size")) is None:
            continue
        if type(size) is not int or size < 1:
            raise SettingsError(
                f"settings: policy.model = {model}: its config.json has vocab_size = {size!r}, expected a whole number "
                "above 0. Give a complete model."
            )
        return size
    return None


def read_max_positions(model: Path) -> int | None:
    """Return the model's longest text in tokens, with its rotary scaling; None when config.json has no length."""
    for part in _configs(model):
        most = part.get("max_position_embeddings") or part.get("n_positions")
        if type(most) is not int or most < 1:
            continue
        scaling = part.get("rope_scaling") or part.get("rope_parameters")
        scaling = scaling if isinstance(scaling, dict) and "gemma3" not in str(part.get("model_type")) else {}
        # As vLLM: every other kind states the scaled length, and Gemma 3 does.
        is_apart = scaling.get("rope_type", scaling.get("type")) in ("linear", "dynamic")
        return int(most * max(1.0, float(scaling.get("factor") or 1.0))) if is_apart else most
    return None


def _configs(model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `text_config` of a model of text and images, empty for others, and the whole config.json."""
    config = json.loads((model / "config.json").read_bytes())
    of_text = config.get("text_config")
    return of_text if isinstance(of_text, dict) else {}, config


BYTES = {"float32": 4, "bfloat16": 2}


_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_OTHER_SENSES = ("vision_config", "audio_config")
_ONE_FILE = "model.safetensors"


def find_model(settings: Settings) -> Path:
    """Return the local folder of policy.model, fetched from the Hugging Face hub when it is a name.

    Raises: SettingsError when it is neither a model folder nor a name in reach.
    """
    name = settings.policy.model
    if not name:
        raise SettingsError("settings: policy.model is not set. Give a model folder or a Hugging Face name.")
    return find_named_model("policy.model", name)


def find_named_model(setting: str, name: str) -> Path:
    """Return the local folder of a setting's model, as `find_model` does."""
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:  # no name on the hub looks like this
            raise SettingsError(f"settings: {setting} = {name} is not a folder. Give one that holds a model.")
        folder = _fetch(setting, name)
    _check_model(folder, setting, name)
    return folder.resolve()


def count_parameters(model: Path) -> int:
    """Return a model folder's number of parameters, from the headers of its safetensors files.

    Without such files: the size of its .bin files at 2 bytes a parameter.
    """
    if not stored_weights(model):
        return sum(path.stat().st_size // 2 for path in model.glob("*.bin"))
    return sum(math.prod(shape) for _, shape in stored_shapes(model))


def stored_weights(model: Path) -> list[Path]:
    """Return the model's safetensors files; [] without any.

    A folder may have others: the same weights for another program (consolidated.safetensors), adapters.
    """
    if (model / _ONE_FILE).is_file():
        return [model / _ONE_FILE]
    present = sorted(model.glob("*.safetensors"))
    try:
        named = set(json.loads((model / f"{_ONE_FILE}.index.json").read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return present
    return [path for path in present if path.name in named]


def is_readable(model: Path) -> bool:
    """Return whether a folder holds a complete model in safetensors files.

    After a loss of power during a write, files can be empty, cut off or missing.
    """
    index = model / f"{_ONE_FILE}.index.json"
    try:
        json.loads((model / "config.json").read_bytes())
        named = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else set()
        present = {path.name for path in stored_weights(model)}
        for name in present:
            with safe_open(model / name, framework="numpy"):
                pass
    except (OSError, ValueError, LookupError, SafetensorError):
        return False
    return bool(present) and named <= present


def _fetch(setting: str, name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise SettingsError(
            f"settings: {setting} = {name} is neither a folder nor a model in reach of the Hugging Face hub "
            f"({type(error).__name__}). Give a model folder."
        ) from None


def _check_model(folder: Path, setting: str, name: str) -> None:
    """Raise SettingsError for an incomplete model. Reads only the headers of its weights."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise SettingsError(f"settings: {setting} = {name} has no config.json. {_cure(folder)}.") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"settings: {setting} = {name}: its config.json is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise SettingsError(f"settings: {setting} = {name}: its config.json is not a JSON object.")
    of_text = config.get("text_config")
    if any(part.get("quantization_config") for part in (config, of_text) if isinstance(part, dict)):
        # transformers computes it with scales that neither training nor a push has.
        raise SettingsError(
            f"settings: {setting} = {name} holds quantised weights (quantization_config in its config.json). Give the "
            "model in bfloat16 or float32."
        )
    if other := next((part for part in _OTHER_SENSES if config.get(part)), None):
        raise SettingsError(
            f"settings: {setting} = {name} reads more than text ({other} in its config.json), and text alone is "
            "trained. Give its language model in a folder of its own (docs/look_up/models.md#models-with-pictures)."
        )
    weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    if not weights:
        raise SettingsError(f"settings: {setting} = {name} holds no weights (*.safetensors). Give a complete model.")
    if not has_tokenizer(folder):
        # transformers would make an empty tokenizer, which turns every text into no tokens.
        cure = "Give a complete model"
        if setting in ("critic.model", "reference.model"):
            cure = "If it was trained with the policy's tokens, copy policy.model's tokenizer files into the folder"
        raise SettingsError(f"settings: {setting} = {name} has no tokenizer. {cure}.")
    if (folder / "adapter_config.json").is_file():
        # transformers applies it if peft is installed, vLLM does not.
        raise SettingsError(
            f"settings: {setting} = {name} holds an adapter (adapter_config.json) and weights. Merge it into them "
            "(peft's merge_and_unload), or remove its files."
        )
    for path in weights:
        if path.suffix == ".safetensors":
            _check_weights(setting, path)


def _cure(folder: Path) -> str:
    """Return what to give in place of a run's or another trainer's folder without config.json."""
    if (folder / "model" / "config.json").is_file():
        return f"It is a checkpoint: give {folder / 'model'}"
    quoted = shlex.quote(str(folder))
    of_run, whole, actor = folder / CHECKPOINTS / "latest" / "model", folder / "huggingface", folder / "actor"
    if of_run.is_dir():
        return f"It is a run folder: give {of_run}"
    if (folder / "adapter_config.json").is_file():
        return f"It is an adapter: sluice migrate {quoted} --output MODEL merges it into its base"
    if actor.is_dir() or stored_weights(whole):
        return f"It is a checkpoint of verl: give {actor if actor.is_dir() else whole}"
    if next(folder.glob("model_world_size_*.pt"), None):
        command = f"python -m verl.model_merger merge --backend fsdp --local_dir {quoted} --target_dir MODEL"
        return f"It has shards of verl: {command} makes a model folder"
    if steps := [path for path in folder.glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]:
        return f"It is a trainer's folder: give {max(steps, key=lambda path: int(path.name.partition('-')[2]))}"
    if next(folder.glob("mp_rank_*"), None):
        return "It is a checkpoint of DeepSpeed: its zero_to_fp32.py makes weights of it, beside a model's config.json"
    return "Give a Hugging Face model folder"


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder has files of a tokenizer."""
    return any(path.name.startswith(("tokenizer", "vocab")) or path.suffix == ".model" for path in folder.iterdir())


def _check_weights(setting: str, path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise SettingsError(
            f"settings: {setting}: {path} cannot be read ({error}). Copy or download the model again."
        ) from None


def model_digest(model_dir: Path) -> str:
    """Return a hash of the model's shape and tokenizer, which a checkpoint must share."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (model_dir / name).is_file():
            digest.update(name.encode() + b"\0" + (model_dir / name).read_bytes())
    return digest.hexdigest()


def changed_file(model: Path, earlier: Path) -> str | None:
    """Return the name of a tokenizer, template or code file that differs from an earlier copy of the folder, or None.

    Other small files count too, as a tokenizer's own code may read any of them. Of generation_config.json only the end
    tokens count: vLLM ends turns there, and reads nothing else of it.
    """
    then, now = (read_small_files(folder, with_code=True) for folder in (earlier, model))
    changed = [name for name in sorted({*then, *now} - _READ_IN_PART) if then.get(name) != now.get(name)]
    return next(iter(changed), None if end_tokens(then) == end_tokens(now) else GENERATION)


def weights_digest(model: Path) -> str:
    """Return a hash of the model's weight files. Reads all of them, several at a time."""
    files = stored_weights(model) or sorted(model.glob("*.bin"))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(_hash_file, files))
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def shape_digest(model: Path, *, with_code: bool) -> str:
    """Return a hash of what makes the same weights another model: the configuration and, if it may run, the code."""
    files = read_small_files(model, with_code=with_code)
    return small_files_digest({n: content for n, content in files.items() if n == "config.json" or n.endswith(".py")})


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


_READ_IN_PART = {"config.json", GENERATION}  # `model_digest` compares the first

# Parts of names of matrices without an adapter: no linear layers, or the head.
_WITHOUT_ADAPTER = ("embed", "lm_head", "wte", "wpe", ".experts.")

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelSize:
    """The sizes that memory depends on."""

    parameters: int
    adapters: int = 0  # trained parameters of LoRA adapters; 0: the model has none
    num_layers: int = 0  # layers of the transformer; 0: unknown, as the next two
    hidden_size: int = 0  # floats per token between layers
    kept_in_layer: int = 0  # floats per token that a layer keeps for its backward pass
    stacked_experts: int = 0  # parameters of the largest weight that holds all experts of a layer
    largest_weight: int = 0  # parameters of the largest single weight: the embedding
    largest_linear: int = 0  # parameters of a layer's largest matrix


def read_model_size(model: Path, lora: LoraSettings | None = None) -> ModelSize:
    """Return the size of a model folder's model with these adapters. None and rank 0: no adapters."""
    adapters = _count_adapters(model, lora) if lora is not None and lora.rank else 0
    parameters = count_parameters(model)
    of_text, config = _configs(model)
    return size_of_shape(parameters, config | of_text, adapters)


def size_of_shape(parameters: int, config: dict[str, Any], adapters: int = 0) -> ModelSize:
    """Return the size of a model with this number of parameters and this config.json."""
    shape = _shape(config)
    if shape is None:
        return ModelSize(parameters, adapters)
    num_layers, hidden_size, query_size, key_size, mlp_size = shape
    # Two norms keep their input, normalised and weighted; attention keeps queries, keys, values, output and the input
    # of its projection; the gated linear layer keeps its gate before and after, its other half, and their product.
    kept = 6 * hidden_size + 3 * query_size + 2 * key_size + 4 * mlp_size
    experts = next((config[name] for name in NUM_EXPERTS if config.get(name)), 0)
    stacked = 2 * experts * hidden_size * (config.get("moe_intermediate_size") or config["intermediate_size"])
    linear = hidden_size * config["intermediate_size"]
    largest = max(hidden_size * (config.get("vocab_size") or 0), linear)
    return ModelSize(parameters, adapters, num_layers, hidden_size, kept, stacked, largest, linear)


def adapters_of_shape(config: dict[str, Any], lora: LoraSettings) -> int:
    """Return the parameters of adapters on a model of this config.json, whose matrices have their usual names."""
    shape = _shape(config)
    if shape is None:
        return 0
    num_layers, hidden_size, query_size, key_size, _ = shape
    of_linear = 0 if config.get("num_experts_per_tok") else hidden_size + config["intermediate_size"]
    sides = {
        **dict.fromkeys(("q_proj", "o_proj"), hidden_size + query_size),
        **dict.fromkeys(("k_proj", "v_proj"), hidden_size + key_size),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), of_linear),
    }
    return lora.rank * num_layers * sum(sides[name] for name in sides if not lora.targets or name in lora.targets)


def _shape(config: dict[str, Any]) -> tuple[int, int, int, int, int] | None:
    """Return (layers, hidden size, size of all queries, of all keys, width of the linear layer inside) or None.

    For a mixture of experts the width is the sum over a token's experts.
    """
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    if not all(type(config.get(name)) is int and config[name] > 0 for name in names):
        return None
    num_layers, hidden_size, heads, mlp_size = (config[name] for name in names)
    key_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden_size // heads
    experts, of_expert = config.get("num_experts_per_tok") or 1, config.get("moe_intermediate_size") or mlp_size
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * of_expert
    return num_layers, hidden_size, heads * head_size, key_heads * head_size, of_expert * experts + shared


def _count_adapters(model: Path, lora: LoraSettings) -> int:
    """Return lora.rank times (inputs + outputs), over all adapted matrices."""
    total = 0
    for name, shape in stored_shapes(model):
        if len(shape) != 2 or not name.endswith(".weight") or any(part in name for part in _WITHOUT_ADAPTER):
            continue
        if not lora.targets or name.split(".")[-2] in lora.targets:
            total += lora.rank * sum(shape)
    return total


def stored_shapes(model: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a folder's tensors."""
    for path in stored_weights(model):
        with safe_open(path, framework="numpy") as file:
            for name in list(file.keys()):  # safe_open is not a mapping
                yield name, tuple(file.get_slice(name).get_shape())
