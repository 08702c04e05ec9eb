"""The check of a start: models that a rank computes as their own code does at the run's length, and refused ones."""

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from learner.models import own_code
from learner.models.micro_batch import make_micro_batch
from learner.models.model_loading import fix_positions, turn_off_dropout
from learner.models.own_code import shallow_config
from learner.models.settings import policy_settings
from learner.models.start_check import Comparison, _texts, check_model, compare
from protocol.errors import OperatorError
from protocol.settings.learner import MIN_SHARED_TOKENS
from protocol.settings.settings import Settings
from tests.benchmarks.packing_table import _BASE, ALONE, ARCHITECTURES, EXACT, REFUSED, comparison_of, settings_of

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 1}
_CHUNKS = {**_EXPERTS, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "head_dim": 8}
_LAYERS = ["chunked_attention", "full_attention"]


def outcome_of(found: Comparison) -> str:
    if found.find_fault(is_packed=True, is_shared=True) is None:
        return EXACT
    return ALONE if found.find_fault(is_packed=False, is_shared=True) is None else REFUSED


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("Qwen3Config", {}),
        ("OPTConfig", {}),  # drops out in functions
        ("DeepseekV3Config", {}),  # values have fewer numbers than keys
        ("Lfm2Config", {}),  # convolves along the tokens
        ("FalconH1Config", {"initializer_range": 0.02}),
        ("BloomConfig", {}),  # masks in code of its own
        ("GptOssConfig", {}),
        ("MistralConfig", {"sliding_window": 16}),
        ("Gemma3TextConfig", {"sliding_window": 16}),
        ("Gemma2Config", {"sliding_window": 16}),
    ],
)
def test_real_architecture_is_as_the_table_says_with_windows_shorter_than_the_text(name: str, others: Any) -> None:
    assert outcome_of(comparison_of(name, seed=0, **others)) == ARCHITECTURES[name][1]


@pytest.mark.parametrize(("num_tokens", "outcome"), [(16, EXACT), (60, REFUSED)])
def test_chunks_in_the_mask_are_refused_for_texts_longer_than_a_chunk(num_tokens: int, outcome: str) -> None:
    given = {**_BASE, **_CHUNKS, "attention_chunk_size": 32, "layer_types": _LAYERS}
    config = transformers.Llama4TextConfig(**given)
    assert outcome_of(compare(config, "language model", num_tokens)) == outcome


@pytest.mark.parametrize(("longest", "factor"), [(32, 1.0), (33, 4.0)])
def test_all_texts_have_one_set_of_factors_of_positions_by_the_longest_text_of_the_run(
    longest: int, factor: float
) -> None:
    num_factors = _BASE["hidden_size"] // _BASE["num_attention_heads"] // 2
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * num_factors, "long_factor": [4.0] * num_factors}
    given = {**_BASE, "original_max_position_embeddings": 32, "rope_scaling": scaling, "pad_token_id": 0}
    config = transformers.Phi3Config(**given)
    fix_positions(config, longest)
    assert config.rope_parameters["short_factor"] == config.rope_parameters["long_factor"] == [factor] * num_factors
    assert outcome_of(compare(config, "language model", 60)) == EXACT


@pytest.mark.parametrize(("objective", "longest"), [("sft", 9000), ("policy_gradient", 700)])
def test_longest_text_is_the_models_longest_row_or_the_context_of_generation(
    tmp_path: Path, objective: str, longest: int
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 9000}')
    settings = Settings.model_validate({"objective": objective, "rollout": {"max_context_tokens": 700}})
    assert policy_settings(settings, tmp_path).longest_text == longest


def test_text_is_longer_than_the_positions_that_a_model_without_scaling_would_have() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    config = transformers.LlamaConfig(**{**_BASE, "max_position_embeddings": 32, "rope_scaling": scaling})
    assert outcome_of(compare(config, "language model", 60)) == ALONE


def test_critic_with_fewer_positions_than_the_longest_trajectory_is_refused() -> None:
    config = transformers.OPTConfig(**{**_BASE, **ARCHITECTURES["OPTConfig"][0], "max_position_embeddings": 32})
    assert outcome_of(compare(config, "critic", 60)) == REFUSED


def test_threshold_that_is_called_jitter_makes_another_function_without_it() -> None:
    given = {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    found = compare(transformers.PhimoeConfig(**given), "language model", 24)
    assert outcome_of(found) == REFUSED
    fault = found.find_fault(is_packed=True, is_shared=False)
    assert fault is not None
    assert fault[0].startswith("computes other numbers than its own code (by ")


@pytest.mark.parametrize(("name", "outcome"), [("LlamaConfig", EXACT), ("Lfm2Config", ALONE), ("BertConfig", REFUSED)])
def test_critic_is_compared_by_its_values(name: str, outcome: str) -> None:
    config = getattr(transformers, name)(**{**_BASE, **ARCHITECTURES.get(name, ({}, ""))[0]})
    assert outcome_of(compare(config, "critic", 60)) == outcome


def test_model_that_changes_its_logits_in_its_own_code_gets_the_method_by_logits() -> None:
    given = {
        **_BASE,
        "lru_width": 32,
        "logits_soft_cap": 3.0,
        "attention_window_size": 64,
        "block_types": ["attention"],
    }
    assert compare(transformers.RecurrentGemmaConfig(**given), "language model", 24).method == "logits"


@pytest.mark.parametrize(
    ("found", "is_packed", "is_shared", "fault"),
    [
        (Comparison(0.0, 1e-6, 1e-6, 1e-6, "head"), True, True, None),
        (Comparison(0.0, 1e-6, 0.01, 0.01, "head"), True, True, "mixes trajectories of one micro-batch (by 0.01)"),
        (Comparison(0.0, 1e-6, 0.01, 0.01, "head"), False, True, None),
        (
            Comparison(0.0, 1e-6, 1e-6, 0.01, "head"),
            True,
            True,
            "computes other numbers after a prompt that trajectories share (by 0.01)",
        ),
        (Comparison(0.0, 1e-6, 1e-6, 0.01, "head"), True, False, None),
        (Comparison(0.0, 0.01, 0.01, 0.01, "head"), False, True, "computes other numbers than its own code (by 0.01)"),
        (Comparison(0.0, nan, nan, nan, "head"), False, True, "computes other numbers than its own code (by nan)"),
        (Comparison(0.0, nan, nan, nan, "head", "raises"), True, True, "raises"),
        (Comparison(0.2, 1e-6, 1e-6, 1e-6, "head"), False, True, "lets a token see later ones (by 0.2)"),
    ],
)
def test_fault_names_the_difference(found: Comparison, is_packed: bool, is_shared: bool, fault: str | None) -> None:
    answer = found.find_fault(is_packed=is_packed, is_shared=is_shared)
    assert (answer and answer[0]) == fault


@pytest.mark.parametrize("micro_batch_tokens", [1, 8192])
def test_refusal_names_model_role_and_cure(tmp_path: Path, micro_batch_tokens: int) -> None:
    transformers.Lfm2Config(**{**_BASE, **ARCHITECTURES["Lfm2Config"][0]}).save_pretrained(tmp_path)
    settings = replace(settings_of(tmp_path), role="reference", micro_batch_tokens=micro_batch_tokens)
    if micro_batch_tokens == 1:
        assert check_model(settings, "language model", name="me/tiny") == "head"
        return
    with pytest.raises(
        OperatorError,
        match=r"^The model me/tiny cannot be used as the reference like this: it mixes trajectories of one micro-batch "
        r"\(by .*\)\. Set learner\.micro_batch_tokens to 1: every trajectory is then computed by itself\.$",
    ):
        check_model(settings, "language model", name="me/tiny")


def test_model_that_mixes_trajectories_is_refused_for_pairs_whatever_the_budget(tmp_path: Path) -> None:
    """Both answers of a pair are in one micro-batch: a budget of one token does not part them."""
    transformers.Lfm2Config(**{**_BASE, **ARCHITECTURES["Lfm2Config"][0]}).save_pretrained(tmp_path)
    settings = replace(settings_of(tmp_path), micro_batch_tokens=1, are_pairs=True)
    with pytest.raises(OperatorError, match=r"mixes trajectories .* Use another model: both answers of a pair are in"):
        check_model(settings, "language model", name="me/tiny")


@pytest.mark.parametrize("num_tokens", [66, 80, 120, 700])
def test_a_prompt_is_shared_in_the_check_of_every_run_that_may_share_one(num_tokens: int) -> None:
    config = transformers.Qwen2Config(**_BASE)
    packed = make_micro_batch(_texts(config, num_tokens), share_prompts=True)
    assert max(number for _, number in packed.prompts) >= MIN_SHARED_TOKENS


@pytest.mark.parametrize(("objective", "are_pairs"), [("dpo", True), ("reward_model", True), ("kto", False)])
def test_pairs_are_those_of_preferences(tmp_path: Path, objective: str, are_pairs: bool) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 900}')
    given = {"objective": objective, "data": {"eval": "rows.jsonl"}}
    assert policy_settings(Settings.model_validate(given), tmp_path).are_pairs == are_pairs


@pytest.mark.parametrize(
    ("config", "depth"),
    [
        (transformers.Qwen3Config(**{**_BASE, "num_hidden_layers": 9}), 1),
        (transformers.Gemma3TextConfig(**{**_BASE, "num_hidden_layers": 12, "sliding_window": 16}), 6),
        (transformers.Glm4MoeConfig(**{**_BASE, **ARCHITECTURES["Glm4MoeConfig"][0], "num_hidden_layers": 7}), 2),
    ],
)
def test_first_layers_contain_each_kind(config: Any, depth: int) -> None:
    shallow = shallow_config(transformers.AutoModelForCausalLM, config)
    assert shallow.num_hidden_layers == depth
    assert len(getattr(shallow, "layer_types", None) or range(depth)) == depth


def test_own_attention_in_blocks_of_queries_equals_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "_MAX_SCORES", 4 * 50 * 7)  # seven queries at a time
    own_code.register()
    config = transformers.Gemma2Config(**_BASE, sliding_window=16, attn_logit_softcapping=2.0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.arange(50)[None]
    expected = model(tokens, use_cache=False).logits
    model.set_attn_implementation(own_code.NAME)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=0, atol=1e-5)


def test_every_dropout_of_a_configuration_and_its_parts_is_turned_off() -> None:
    opt = transformers.OPTConfig(dropout=0.1, attention_dropout=0.2, layerdrop=0.3, init_std=0.25)
    gpt2 = transformers.GPT2Config()
    gemma = transformers.Gemma3Config(text_config={"attention_dropout": 0.5})
    for config in (opt, gpt2, gemma):
        turn_off_dropout(config)
    assert (opt.dropout, opt.attention_dropout, opt.layerdrop, opt.init_std) == (0.0, 0.0, 0.0, 0.25)
    assert (gpt2.attn_pdrop, gpt2.embd_pdrop, gpt2.resid_pdrop) == (0.0, 0.0, 0.0)
    assert gemma.text_config.attention_dropout == 0.0
