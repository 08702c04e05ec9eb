"""A Hugging Face model folder, read without loading the model: is it whole, how large, which vocabulary, what shape."""

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from protocol.errors import SettingsError
from protocol.settings.settings import Settings


def read_vocab_size(model: Path) -> int | None:
    """Return the rows of a model's embedding as its config.json tells them, or None when it does not.

    A model of text and images tells its language model's under `text_config`.
    Raises: SettingsError when it tells something that is no number of rows.
    """
    config = json.loads((model / "config.json").read_bytes())
    of_text = config.get("text_config")
    for part in (of_text if isinstance(of_text, dict) else {}, config):
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
    """Return the tokens of the longest text a model takes, or None when its config.json does not tell.

    Rotary scaling stretches it by its factor.
    """
    config = json.loads((model / "config.json").read_bytes())
    of_text = config.get("text_config")
    for part in (of_text if isinstance(of_text, dict) else {}, config):
        most = part.get("max_position_embeddings") or part.get("n_positions")
        if type(most) is not int or most < 1:
            continue
        scaling = part.get("rope_scaling") or part.get("rope_parameters") or {}
        factor = scaling.get("factor", 1.0) if isinstance(scaling, dict) else 1.0
        return int(most * max(1.0, factor)) if isinstance(factor, int | float) else most
    return None


BYTES = {"float32": 4, "bfloat16": 2}


_WEIGHT_SUFFIXES = (".safetensors", ".bin")
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
    """Return the local folder of the model that this setting names, as `find_model` does."""
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:  # no name on the hub looks like this
            raise SettingsError(f"settings: {setting} = {name} is not a folder. Give one that holds a model.")
        folder = _fetch(setting, name)
    _check_model(folder, setting, name)
    return folder.resolve()


def count_parameters(model: Path) -> int:
    """Return the number of parameters in a model folder: from the headers of its safetensors files; for one without
    such files, as many as its files may hold at 2 bytes each.
    """
    stored = stored_weights(model)
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


def stored_weights(model: Path) -> list[Path]:
    """Return the safetensors files that a reader of a model folder opens; [] where it has none.

    Others may lie beside them: the same weights in one file for another program (consolidated.safetensors), adapters.
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
    """Return whether a folder holds a model in safetensors files, each as long as its own table tells.

    One that was being written when the machine lost its power has files that are empty, cut off or missing.
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
    """Raise SettingsError for a folder that is no whole model; reads the headers of its weights, not the weights."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise SettingsError(
            f"settings: {setting} = {name} has no config.json. Give a Hugging Face model folder."
        ) from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"settings: {setting} = {name}: its config.json is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise SettingsError(f"settings: {setting} = {name}: its config.json is no JSON object.")
    weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    if not weights:
        raise SettingsError(f"settings: {setting} = {name} holds no weights (*.safetensors). Give a complete model.")
    if not any(path.name.startswith(("tokenizer", "vocab")) or path.suffix == ".model" for path in folder.iterdir()):
        # Asked for it, transformers would give an empty tokenizer of this kind of model: every text becomes no token.
        raise SettingsError(f"settings: {setting} = {name} has no tokenizer. Give a complete model.")
    for path in weights:
        if path.suffix == ".safetensors":
            _check_weights(setting, path)


def _check_weights(setting: str, path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise SettingsError(
            f"settings: {setting}: {path} cannot be read ({error}). Copy or download the model again."
        ) from None


def model_digest(model_dir: Path) -> str:
    """Return a hash of the model's shape and tokenizer: what a checkpoint must agree on, whatever its weights."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (model_dir / name).is_file():
            digest.update(name.encode() + b"\0" + (model_dir / name).read_bytes())
    return digest.hexdigest()
