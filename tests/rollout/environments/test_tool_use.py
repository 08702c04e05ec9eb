"""The policy calls tools through the chat templates of three families: tokens, masks, mistakes, limits and ends."""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import NeighbourError, SettingsError
from protocol.settings.tools import ToolsSettings
from protocol.wire.trajectory import Trajectory
from rollout.environments.base import Resources, Task, ToolRefusal
from rollout.environments.tool_use.tool_use import make_tool_use
from rollout.episodes.conversation import SampleTask
from rollout.neighbours.node import Node
from rollout.neighbours.tools.calculator import Calculator
from tests.fakes.engines import TokenizingEngine
from tests.fakes.rollout_fakes import ScriptedScorer, make_keys, make_spec
from tests.fakes.tool_models import FAMILIES, ToolModel
from tests.rollout.episodes.played import make_player

ASKED = [{"role": "user", "content": "What is 12 * 12?"}]
TOOLS = ToolsSettings(names=["calculator"])


class Echo:
    """A tool whose reply is given."""

    def __init__(self, reply: str | Exception) -> None:
        self.reply = reply

    schema = Calculator.schema

    async def __call__(self, *args: Any) -> Any: ...

    async def answer(self, arguments: Any) -> str:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


def _calculator() -> Calculator:
    return Calculator(make_spec(), Node(None, None, "t", make_keys()))


async def _played(
    model: ToolModel, write: Callable[[str], str], tool: Any = None, max_turns: int = 3, **limits: Any
) -> tuple[Trajectory, TokenizingEngine]:
    engine = TokenizingEngine(write, model.tokenizer())
    resources = Resources(max_turns, {"calculator": tool or _calculator()}, engine.tokenizer)
    limits = {"max_response_tokens": 200, "max_context_tokens": 4096, "max_observation_tokens": 500, **limits}
    player = make_player(engine, make_tool_use(TOOLS), ScriptedScorer(), resources, **limits)
    sample = SampleTask("g", 0, 1, 1, "train", 7, Task(ASKED, "144", {}))
    return await player.play(sample), engine


def _texts(trajectory: Trajectory, engine: TokenizingEngine) -> tuple[str, str, str]:
    """Return what was decoded: the prompt, what the policy wrote, and what it was told after the prompt."""
    start = trajectory.facts.num_prompt_tokens
    tokens, mask = trajectory.tokens[start:], trajectory.loss_mask[start:].astype(bool)
    parts = (trajectory.tokens[:start], tokens[mask], tokens[~mask])
    return tuple(engine.decode(part.tolist()) for part in parts)  # type: ignore[return-value]


# Families whose calls hold their arguments as JSON.
JSON_FAMILIES = [name for name in FAMILIES if name != "qwen3_coder"]


def _calling(model: ToolModel, arguments: str = '{"expression": "12 * 12"}', name: str = "calculator") -> str:
    return model.call.format(name=name, arguments=arguments) + model.end


@pytest.mark.parametrize("family", JSON_FAMILIES)
async def test_call_is_answered_as_the_template_carries_results(family: str) -> None:
    model = FAMILIES[family]
    turns = [_calling(model), f"It is 144.{model.end}"]
    said = iter(turns)
    trajectory, engine = await _played(model, lambda context: next(said))
    prompt, written, told = _texts(trajectory, engine)
    canonical = engine.tokenizer.apply_chat_template(
        ASKED, tools=[Calculator.schema], add_generation_prompt=True, tokenize=False
    )
    assert prompt == canonical
    assert written == "".join(turns)
    assert told == model.result.format(text="144")
    assert (trajectory.facts.finish, trajectory.facts.num_turns) == ("answer", 2)
    # What is trained is what the template would have made of the whole, token by token.
    whole = canonical + turns[0] + model.result.format(text="144") + turns[1]
    assert trajectory.tokens.tolist() == engine.tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("family", JSON_FAMILIES)
async def test_turn_that_the_policy_did_not_end_is_ended_by_the_template(family: str) -> None:
    model = FAMILIES[family]
    said = iter([_calling(model).removesuffix(model.end), f"It is 144.{model.end}"])
    trajectory, engine = await _played(model, lambda context: next(said))
    _, _, told = _texts(trajectory, engine)
    assert told == model.end + model.result.format(text="144")


@pytest.mark.parametrize("family", JSON_FAMILIES)
async def test_names_of_control_tokens_in_a_result_stay_letters(family: str) -> None:
    model = FAMILIES[family]
    said = iter([_calling(model), f"It is 144.{model.end}"])
    payload = f"a{model.end}" + "".join(model.control)
    trajectory, engine = await _played(model, lambda context: next(said), Echo(payload))
    _, _, told = _texts(trajectory, engine)
    assert told == model.result.format(text=payload)
    clean = engine.tokenizer.encode(model.result.format(text="144"), add_special_tokens=False)
    start = trajectory.facts.num_prompt_tokens
    unmasked = [int(t) for t, m in zip(trajectory.tokens[start:], trajectory.loss_mask[start:], strict=True) if not m]
    control = set(engine.tokenizer.all_special_ids)
    assert [t for t in unmasked if t in control] == [t for t in clean if t in control]


@pytest.mark.parametrize("family", JSON_FAMILIES)
async def test_long_result_loses_its_end_and_the_template_keeps_its_words(family: str) -> None:
    model = FAMILIES[family]
    said = iter([_calling(model), f"It is 144.{model.end}"])
    trajectory, engine = await _played(model, lambda context: next(said), Echo("é" * 500), max_observation_tokens=180)
    _, _, told = _texts(trajectory, engine)
    before, after = model.result.format(text="\0").split("\0")
    assert told.startswith(before)
    assert told.endswith(after)
    kept = told.removeprefix(before).removesuffix(after)
    assert set(kept) == {"é"}
    num_told = trajectory.facts.num_tokens - trajectory.facts.num_prompt_tokens - int(trajectory.loss_mask.sum())
    assert 170 <= num_told <= 180


HERMES = FAMILIES["hermes"]


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        (_calling(HERMES, name="calc"), "Error: there is no tool calc. There are: calculator"),
        (_calling(HERMES, "{}"), "Error: the argument expression is missing"),
        (_calling(HERMES, '{"expression": "1 / 0"}'), "Error: division by zero"),
        (
            "<tool_call>{</tool_call><|im_end|>",
            "Error: the call cannot be read: it is not a complete call in the format",
        ),
    ],
)
async def test_mistake_of_the_policy_is_a_result_that_says_what_is_wrong(turn: str, told: str) -> None:
    said = iter([turn, "Four.<|im_end|>"])
    trajectory, engine = await _played(HERMES, lambda context: next(said))
    assert told in _texts(trajectory, engine)[2]
    assert trajectory.facts.finish == "answer"


async def test_refusal_of_a_tool_is_read_whole_like_an_answer() -> None:
    refusal = "Traceback\n" + "  File a.py\n" * 60 + "ZeroDivisionError: \ud800"
    said = iter([_calling(HERMES), "It is 144.<|im_end|>"])
    tool, limits = Echo(ToolRefusal(refusal)), {"max_observation_tokens": 3000}
    trajectory, engine = await _played(HERMES, lambda context: next(said), tool, **limits)
    whole = f"Error: {refusal}".replace("\ud800", "?")
    assert _texts(trajectory, engine)[2] == HERMES.result.format(text=whole)


async def test_several_calls_of_a_turn_are_answered_in_order_up_to_the_limit() -> None:
    calls = "".join(f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{n}"}}}}' "</tool_call>"
                    for n in range(10))  # fmt: skip
    said = iter([calls + "<|im_end|>", "Many.<|im_end|>"])
    trajectory, engine = await _played(HERMES, lambda context: next(said), max_response_tokens=2000)
    told = _texts(trajectory, engine)[2]
    results = [part.partition("\n</tool_response>")[0] for part in told.split("<tool_response>\n")[1:]]
    refused = "Error: more than 8 calls in one turn: this one was not run"
    assert results == [*map(str, range(8)), refused, refused]


async def test_result_names_the_id_that_a_policy_gave_to_its_call() -> None:
    model = FAMILIES["mistral"]
    call = _calling(model).replace("}]", '}, "id": "VvvODy9mT"}]').replace('}}, "id"', '}, "id"')
    said = iter([call + model.end, f"144.{model.end}"])
    trajectory, engine = await _played(model, lambda context: next(said))
    assert _texts(trajectory, engine)[2] == model.result.format(text="144").replace("call00000", "VvvODy9mT")


async def test_calls_after_the_last_turn_are_not_run() -> None:
    trajectory, engine = await _played(HERMES, lambda context: _calling(HERMES), max_turns=2)
    assert (trajectory.facts.finish, trajectory.facts.num_turns) == ("turns", 3)
    assert _texts(trajectory, engine)[2].count("\n144\n") == 2


async def test_turn_that_was_cut_ends_the_conversation() -> None:
    trajectory, _ = await _played(HERMES, lambda context: _calling(HERMES), max_response_tokens=30)
    assert (trajectory.facts.finish, trajectory.facts.num_turns) == ("length", 1)


async def test_tool_that_is_down_fails_the_sample() -> None:
    down = Echo(NeighbourError("retriever", "no answer"))
    with pytest.raises(NeighbourError, match="retriever: no answer"):
        await _played(HERMES, lambda context: _calling(HERMES), down)


def test_model_without_a_template_is_refused() -> None:
    tokenizer = HERMES.tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(SettingsError, match=r"policy.model has no chat template"):
        make_tool_use(TOOLS).check_model(tokenizer)
