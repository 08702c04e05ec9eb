"""An adapter that PEFT wrote (TRL's output folder, verl's lora_adapter), merged into its base as a model folder."""

import json
import os
import shutil
from pathlib import Path

from learner.models.weights.lora import CONFIG
from protocol.errors import SettingsError


def merge_adapter(adapter: Path, output: Path) -> str:
    """Write the base model with an adapter merged into it to `output`; returns the base's name.

    The weights keep the base's type. The tokenizer is the adapter folder's, if it has one.
    Raises: SettingsError when `output` exists, or the adapter or its base cannot be read.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if output.exists():
        raise SettingsError(f"migrate: {output} exists. Give --output a new folder.")
    try:
        base = str(json.loads((adapter / CONFIG).read_bytes())["base_model_name_or_path"] or "")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), str(adapter))
        has_tokenizer = any(path.name.startswith("tokenizer") for path in adapter.iterdir())
        tokenizer = AutoTokenizer.from_pretrained(str(adapter) if has_tokenizer else base)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SettingsError(
            f"migrate: {adapter} cannot be merged into its base ({type(error).__name__}: {str(error)[:300]}). Set "
            f"base_model_name_or_path in its {CONFIG} to a model in reach."
        ) from None
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.merge_and_unload().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, output)
    return base
