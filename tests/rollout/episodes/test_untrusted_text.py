"""Nobody's words but the template's become control tokens, and none of them is trained: eight families of tokenizers,
27 hostile texts, every way in."""

from typing import Any

import pytest

from protocol.wire.trajectory import Trajectory
from tests.fakes.hostile_texts import hostile_texts
from tests.fakes.tokenizer_families import FAMILIES, tokenizer_of
from tests.rollout.episodes.untrusted_ways import WAYS

HARMLESS = "the lazy dog"


def _controls(family: str, tokens: Any) -> list[str]:
    """Return the names of the control tokens among these, as the tokenizer itself counts them."""
    tokenizer = tokenizer_of(family)
    control = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    control |= set(tokenizer.all_special_ids)
    control -= {tokenizer.unk_token_id}
    return [tokenizer.convert_ids_to_tokens(int(token)) for token in tokens if int(token) in control]


def _given(trajectory: Trajectory) -> list[int]:
    """Return the tokens that the policy did not write, in order."""
    return [int(token) for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if not mask]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_hostile_text_makes_no_control_token_and_is_never_trained(family: str, way: str) -> None:
    it = FAMILIES[family]
    harmless, _ = await WAYS[way](family, HARMLESS)
    expected = _controls(family, _given(harmless))
    for name, text in hostile_texts(it.names, it.end).items():
        trajectory, written = await WAYS[way](family, text)
        assert _controls(family, _given(trajectory)) == expected, name
        mask = trajectory.loss_mask.astype(bool)
        assert trajectory.tokens[mask].tolist() == written, name
        assert not trajectory.loss_mask[: trajectory.facts.num_prompt_tokens].any(), name
        assert not trajectory.behaviour_logprobs[~mask].any(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_hostile_to_the_family(family: str) -> None:
    it = FAMILIES[family]
    plain = {name: tokenizer_of(family).encode(text) for name, text in hostile_texts(it.names, it.end).items()}
    assert len(plain) >= 20
    hostile = [name for name, tokens in plain.items() if len(_controls(family, tokens)) > 1]
    assert len(hostile) >= 12, hostile
