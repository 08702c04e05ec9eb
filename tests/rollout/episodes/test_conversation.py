"""A conversation on its own: turns, replies, the end, and its transcript taken up elsewhere."""

from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest

from protocol.errors import NeighbourError
from protocol.settings.rollout import RolloutSettings, SamplingSettings
from protocol.wire.conversation import FinishedTurn
from protocol.wire.trajectory import TurnReward, VersionSpan
from rollout.engine.version_gate import VersionGate
from rollout.environments.base import Task
from rollout.episodes.conversation import Conversations, SampleTask, WrittenSoFar, control_tokens_but_tags
from rollout.episodes.transcript import Transcript
from tests.fakes.engines import ScriptedEngine, TokenizingEngine, Written
from tests.fakes.rollout_fakes import ScriptedScorer
from tests.fakes.tiny_models import byte_tokenizer
from tests.protocol.wire.examples import example_part, part_buffers

TASK = SampleTask("g", 2, 1, 1, "train", 7, Task("Q?", "A", {}))


def _conversations(engine: ScriptedEngine, server: str = "s0", **settings: Any) -> Conversations:
    gate = VersionGate()
    gate.open()
    limits = {"max_response_tokens": 8, "max_context_tokens": 32, **settings}
    return Conversations(engine, gate, RolloutSettings(**limits), server)


def _tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


async def test_conversation_is_turns_and_replies_until_it_is_finished() -> None:
    written = WrittenSoFar()
    engine = ScriptedEngine(lambda context: "cd" if "b" in context else Written("ab", first_logprob=-0.5), version=7)
    conversation = _conversations(engine).begin(TASK, _tokens("Q?"), written)

    first = await conversation.next_turn(stop=("b",))
    assert (first.text, first.stop_string) == ("ab", "b")
    assert conversation.observe(_tokens("--"))
    conversation.transcript.add_reward(0.25)
    engine.policy_version = 8
    assert (await conversation.next_turn()).text == "cd"
    trajectory = await conversation.finish_scored("stop", "Q?", "ab--cd", ScriptedScorer(0.5))

    assert trajectory.tokens.tolist() == _tokens("Q?ab--cd")
    assert trajectory.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert trajectory.behaviour_logprobs.tolist() == [0, 0, -0.5, -1, 0, 0, -0.125, -0.25]
    facts = trajectory.facts
    assert facts.version_spans == [VersionSpan(2, 4, 7), VersionSpan(6, 8, 8)]
    assert (facts.reward, facts.reward_parts) == (0.75, {"fake": 0.5, "environment": 0.25})
    assert (facts.num_turns, facts.num_prompt_tokens, facts.finish) == (2, 2, "stop")
    assert (facts.group, facts.sample_index, facts.server) == ("g", 2, "s0")
    turns = [msgspec.structs.replace(turn, calls=[]) for turn in conversation.transcript.turns]
    assert turns == [FinishedTurn(2, 4, "stop", "b"), FinishedTurn(6, 8, "stop", None)]
    assert [(call.kind, call.name, call.num_input, call.num_output) for call in facts.calls] == [
        ("turn", "stop", 2, 2),
        ("turn", "stop", 6, 2),
    ]
    assert written.num_model_tokens == 4


@pytest.mark.parametrize(
    ("kind", "only_eval", "is_drawn_so"),
    [
        ("eval", True, True),
        ("train", True, False),
        ("eval", False, True),
        ("train", False, True),
    ],
)
async def test_sampling_settings_reach_the_engine_for_the_samples_that_they_are_for(
    kind: Literal["train", "eval"], only_eval: bool, is_drawn_so: bool
) -> None:
    engine = ScriptedEngine(lambda context: "ab")
    gate = VersionGate()
    gate.open()
    sampling = SamplingSettings(
        top_p=0.9, top_k=5, min_p=0.1, logit_bias={7: -1.0}, stop=["</s>", "b"], only_eval=only_eval
    )
    shared = Conversations(engine, gate, RolloutSettings(), "s0", sampling)
    sample = replace(TASK, kind=kind)
    await shared.begin(sample, _tokens("Q?")).next_turn(stop=("b",))
    ((_, drawn, _, _),) = engine.requests
    expected = (0.9, 5, 0.1, {7: -1.0}, ("b", "</s>")) if is_drawn_so else (1.0, 0, 0.0, {}, ("b",))
    assert (drawn.top_p, drawn.top_k, drawn.min_p, drawn.logit_bias, drawn.stop) == expected


async def test_each_turn_draws_with_a_seed_of_its_own() -> None:
    """The same seed and the same logits would write the same first token in every turn."""
    engine = ScriptedEngine(lambda context: "ab")
    conversation = _conversations(engine).begin(TASK, _tokens("Q?"))
    for _ in range(3):
        await conversation.next_turn()
    assert len({sampling.seed for _, sampling, _, _ in engine.requests}) == 3


@pytest.mark.parametrize("num_tokens", [0, 32, 33])
def test_prompt_without_tokens_or_room_begins_no_conversation(num_tokens: int) -> None:
    with pytest.raises(NeighbourError, match=rf"^prompt: has {num_tokens} tokens; rollout.max_context_tokens = 32$"):
        _conversations(ScriptedEngine(lambda context: "a")).begin(TASK, [65] * num_tokens)


@pytest.mark.parametrize("form", [msgspec.msgpack, msgspec.json])
async def test_conversation_is_taken_up_on_another_engine_where_it_was_left(form: Any) -> None:
    """Two turns here; or one here, its transcript sent, one there: the same tokens, the same requests."""

    def write(context: str) -> Written:
        return Written("cd" if "b" in context else "ab", first_logprob=-1 / 3)

    here, there = ScriptedEngine(write, version=7), ScriptedEngine(write, version=7)
    whole = _conversations(here).begin(TASK, _tokens("Q?"))
    begun = _conversations(here).begin(TASK, _tokens("Q?"))
    for conversation in (whole, begun):
        await conversation.next_turn(("b",))
        conversation.observe(_tokens("--"))
        conversation.transcript.add_reward(0.1)

    sent = form.decode(form.encode(begun.transcript), type=Transcript)
    taken_up = _conversations(there, "s1").take_up(TASK, sent)
    await whole.next_turn()
    await taken_up.next_turn()

    one, other = [await each.finish_scored("stop", "", "", ScriptedScorer(1.0)) for each in (whole, taken_up)]
    assert one.to_buffers() == other.to_buffers()
    assert one.facts.version_spans == other.facts.version_spans
    assert (one.facts.reward, one.facts.reward_parts) == (other.facts.reward, other.facts.reward_parts)
    assert (one.facts.server, other.facts.server) == ("s0", "s1")
    assert other.facts.num_turns == 2
    assert here.requests[-1][:2] == there.requests[0][:2]  # what the policy saw, and its sampling with the seed


def test_rewards_of_turns_go_on_with_the_conversation() -> None:
    part = example_part(reward=0.25, score=0.5, turn_rewards=[TurnReward(4, 0.25)])
    transcript = Transcript.of_part(part, part_buffers())
    assert (transcript.reward, transcript.turn_rewards, transcript.score) == (0.25, [TurnReward(4, 0.25)], 0.5)


def test_response_without_control_tokens_keeps_tags_that_are_tokens() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("<answer>2</answer><eos>", add_special_tokens=False)["input_ids"]
    kept = [each for each in ids if each not in control_tokens_but_tags(tokenizer)]
    assert tokenizer.decode(kept, skip_special_tokens=False) == "<answer>2</answer>"


@pytest.mark.parametrize(
    ("written", "answer"),
    [("It is 7<eos>", "it is 7"), ("It is 7", "it is 7"), ("3 + 4\n#### 7<eos>", "7"), ("<eos>", "")],
)
async def test_end_token_is_no_part_of_an_evaluated_answer(written: str, answer: str) -> None:
    engine = TokenizingEngine(lambda context: written, byte_tokenizer())
    conversation = _conversations(engine, max_response_tokens=16).begin(replace(TASK, kind="eval"), engine.encode("Q?"))
    await conversation.next_turn()
    trajectory = await conversation.finish_scored("stop", "Q?", written, ScriptedScorer(1.0))
    assert trajectory.facts.answer == answer
