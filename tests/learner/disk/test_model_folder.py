"""The size of a model's vocabulary and the longest text it takes, from its config.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from learner.disk.model_folder import find_named_model, is_readable, read_max_positions, read_vocab_size
from protocol.errors import SettingsError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 151936}, 151936),
        ({"text_config": {"vocab_size": 262208}}, 262208),
        ({"vocab_size": 7, "text_config": {"vocab_size": 262208}}, 262208),
        ({"vocab_size": 151936, "text_config": {"hidden_size": 8}}, 151936),
        ({"vocab_size": 151936, "text_config": {"vocab_size": None}}, 151936),
        ({"vocab_size": 151936, "text_config": None}, 151936),
        ({"model_type": "other"}, None),
    ],
)
def test_vocabulary_is_as_large_as_the_config_says(
    tmp_path: Path, config: dict[str, Any], expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_vocab_size(tmp_path) == expected


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "272"])
def test_vocabulary_that_is_no_number_of_tokens_is_refused(tmp_path: Path, size: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}), encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        read_vocab_size(tmp_path)
    assert str(caught.value) == (
        f"settings: policy.model = {tmp_path}: its config.json has vocab_size = {size!r}, expected a whole number "
        "above 0. Give a complete model."
    )


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"n_positions": 512}, 512),
        ({"vocab_size": 5}, None),
        ({"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 1024, "rope_scaling": None}, 1024),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 1024}, 64),
    ],
)
def test_longest_text_is_read_from_the_models_configuration(
    tmp_path: Path, config: dict[str, object], positions: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_max_positions(tmp_path) == positions


@pytest.mark.parametrize(
    ("setting", "cure"), [("policy.model", "Give a complete model"), ("critic.model", "If it was trained with the ")]
)
def test_model_without_a_tokenizer_is_refused_with_the_cure(tmp_path: Path, setting: str, cure: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=rf"{setting} = .* has no tokenizer\. {cure}"):
        find_named_model(setting, str(tmp_path))


@pytest.mark.parametrize("config", [{"quantization_config": {"quant_method": "fp8"}},
                                     {"text_config": {"quantization_config": {"bits": 4}}}])  # fmt: skip
@pytest.mark.parametrize("setting", ["policy.model", "reference.model"])
def test_quantised_model_is_refused(tmp_path: Path, setting: str, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        save_file({}, tmp_path / name)
    with pytest.raises(SettingsError) as refused:
        find_named_model(setting, str(tmp_path))
    assert str(refused.value) == (
        f"settings: {setting} = {tmp_path} holds quantised weights (quantization_config in its config.json). Give the "
        "model in bfloat16 or float32."
    )
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    find_named_model(setting, str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-2.safetensors"])
def test_model_whose_writing_a_loss_of_power_cut_short_cannot_be_read(tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        save_file({f"part_{number}": np.zeros(64)}, tmp_path / f"model-{number}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {f"part_{number}": f"model-{number}.safetensors" for number in (1, 2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert is_readable(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for length in (0, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:length])
        assert not is_readable(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    assert not is_readable(tmp_path)
