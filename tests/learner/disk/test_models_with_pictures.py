"""A model that also reads pictures is refused, and the lines of the documentation write its language model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from learner.disk.model_folder import find_named_model
from protocol.errors import SettingsError
from tests.fakes.tiny_models import byte_tokenizer

_PAGE = Path(__file__).parents[3] / "docs" / "look_up" / "models.md"
_TEXT: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2},
}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}
_LINEAR: dict[str, Any] = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}


def _gemma3() -> Any:
    vision = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    return transformers.Gemma3Config(text_config=_TEXT, vision_config=vision, mm_tokens_per_image=4)


def _qwen3_5() -> Any:
    vision = {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    return transformers.Qwen3_5Config(text_config={**_TEXT, **_LINEAR}, vision_config=vision)


@pytest.mark.parametrize("config", [_gemma3, _qwen3_5])
def test_documented_lines_write_the_language_model_of_a_refused_folder(tmp_path: Path, config: Any) -> None:
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(config()).eval()
    source, target = tmp_path / "source", tmp_path / "target"
    whole.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    with pytest.raises(SettingsError, match=r"reads more than text \(vision_config in its config\.json\)"):
        find_named_model("policy.model", str(source))

    (lines,) = re.findall(r"## Models with pictures.*?```python\n(.*?)```", _PAGE.read_text("utf-8"), re.DOTALL)
    exec(lines, {"SOURCE": source, "TARGET": target})  # noqa: S102  # our own page

    text = transformers.AutoModelForCausalLM.from_pretrained(find_named_model("policy.model", str(target))).eval()
    tokens = torch.arange(5, 45)[None]
    with torch.no_grad():
        torch.testing.assert_close(text(input_ids=tokens).logits, whole(input_ids=tokens).logits, rtol=0, atol=1e-5)
