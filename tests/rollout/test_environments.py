"""Bundled environments turn by turn, and how a user's own are found."""

import sys
from pathlib import Path

import pytest

from protocol.errors import NeighbourError, SettingsError
from protocol.settings.rollout import ENVIRONMENT_FORMS
from rollout.environments.base import Observation, Resources, SingleTurn, Step, Task, Turn
from rollout.environments.loading import load_environment, required_tools
from rollout.environments.search import Search, query_of, render_passages

TASK = Task("What is the alpha-3 code of the country Belarus?", "BLR", {})
BELARUS = '"Belarus"\ncountry; alpha-2 code BY; alpha-3 code BLR; numeric code 112.'
CORRECTION = Step(Observation(" That was neither a search nor an answer.", "<information>", "</information>"))


class Passages:
    """A retriever that always finds the same and notes what it was asked."""

    def __init__(self, *contents: str) -> None:
        self.queries: list[str] = []
        self._contents = list(contents)

    async def search(self, query: str) -> list[str]:
        self.queries.append(query)
        return self._contents


async def test_single_turn_ends_after_the_first_turn() -> None:
    environment = SingleTurn(Resources(max_turns=4))

    assert await environment.reset(TASK) == TASK.prompt
    assert await environment.step(Turn("BLR", "stop")) == Step(is_done=True)


async def test_search_answers_a_search_with_passages() -> None:
    passages = Passages(BELARUS)
    environment = Search(Resources(3, {"search": passages.search}))

    step = await environment.step(Turn("<search> country Belarus</search>", "stop", "</search>"))

    assert passages.queries == ["country Belarus"]
    assert not step.is_done
    assert isinstance(step.observation, Observation)
    assert step.observation.text == (
        "<information> Belarus: country; alpha-2 code BY; alpha-3 code BLR; numeric code 112.</information>"
    )


async def test_search_ends_with_an_answer() -> None:
    step = await Search(Resources(3)).step(Turn("<answer> BLR</answer>", "stop", "</answer>"))

    assert step == Step(is_done=True, finish="answer")


@pytest.mark.parametrize(
    "turn",
    [
        Turn("I do not know.<eos>", "stop"),
        Turn("<search> country", "length"),
        Turn("<search> </search>", "stop", "</search>"),
        Turn("country</search>", "stop", "</search>"),
        Turn("BLR</answer>", "stop", "</answer>"),
    ],
)
async def test_search_corrects_what_is_neither(turn: Turn) -> None:
    assert await Search(Resources(3)).step(turn) == CORRECTION


async def test_search_runs_no_search_after_max_turns() -> None:
    passages = Passages(BELARUS)
    environment = Search(Resources(2, {"search": passages.search}))
    turn = Turn("<search> country</search>", "stop", "</search>")

    steps = [await environment.step(turn) for _ in range(3)]

    assert [step.is_done for step in steps] == [False, False, True]
    assert steps[2].finish == "turns"
    assert len(passages.queries) == 2


async def test_search_takes_an_answer_in_the_last_generation() -> None:
    environment = Search(Resources(1, {"search": Passages().search}))
    await environment.step(Turn("<search> x</search>", "stop", "</search>"))

    assert (await environment.step(Turn("<answer> y</answer>", "stop", "</answer>"))).finish == "answer"


@pytest.mark.parametrize(
    ("turn", "query"),
    [
        (Turn("<search> a </search>", "stop", "</search>"), "a"),
        (Turn("<search> a<search> b</search>", "stop", "</search>"), "b"),
        (Turn("<search> a</search>\n", "stop", "</search>"), "a"),
        (Turn("<search> a</search> and on<eos>", "stop"), None),
        (Turn("</search><search>", "stop", "</search>"), None),
    ],
)
def test_query_is_the_text_between_the_last_open_tag_and_the_end(turn: Turn, query: str | None) -> None:
    assert query_of(turn) == query


@pytest.mark.parametrize(
    ("contents", "body"),
    [
        ([], " Nothing was found."),
        (['"A "b""\nText \n'], ' A "b": Text'),
        (["  no title "], " no title"),
        (['"A"\none\ntwo', '"B"\nthree'], " A: one\ntwo\n B: three"),
        (['"Ada"\nShe wrote "Notes"\nand more.'], ' Ada: She wrote "Notes"\nand more.'),
    ],
)
def test_passages_are_rendered_in_order(contents: list[str], body: str) -> None:
    assert render_passages(contents) == body


def test_loading_finds_the_bundled_environments() -> None:
    assert load_environment("single_turn") is SingleTurn
    assert load_environment("search") is Search
    assert required_tools(Search) == {"search"}
    assert required_tools(SingleTurn) == frozenset()


def test_class_that_says_uses_retriever_requires_the_search_tool() -> None:
    class Older(SingleTurn):
        uses_retriever = True
        requires = ("python",)

    assert required_tools(Older) == {"python", "search"}


async def test_tool_that_was_not_required_is_a_failure_of_the_environment() -> None:
    with pytest.raises(NeighbourError, match=r"^environment: uses the tool 'search': .* requires = {'search'}$"):
        await Resources(3).search("x")


def test_loading_finds_a_class_in_a_module() -> None:
    assert load_environment("rollout.environments.search:Search") is Search


USER_FILE = """
from dataclasses import dataclass
from rollout.environments.base import Step

@dataclass
class Mine:
    resources: object
    stop = ("END",)

    async def reset(self, task):
        return task.prompt

    async def step(self, turn):
        return Step(is_done=True, reward=0.5)

class Half:
    stop = ()
    async def reset(self, task): ...
    def step(self, turn): ...

class Wanting(Mine):
    requires = "search"

class Stopless:
    stop = "END"
    async def reset(self, task): ...
    async def step(self, turn): ...
"""


async def test_loading_finds_a_class_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)

    environment = load_environment(f"{path}:Mine")(Resources(1))

    assert environment.stop == ("END",)
    assert await environment.step(Turn("x", "stop")) == Step(is_done=True, reward=0.5)
    del sys.modules[type(environment).__module__]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("serach", f"serach: expected one of {ENVIRONMENT_FORMS}."),
        ("{folder}/none.py:Mine", "there is no file {folder}/none.py on node "),
        (
            "{folder}/mine.py:Wanting",
            "{folder}/mine.py:Wanting: its `requires` is 'search', expected names of tools such as {{'search'}}.",
        ),
        ("{folder}/mine.py:Yours", "{folder}/mine.py has no class Yours. It has "),
        ("{folder}/mine.py:Half", "it has no `async def step`. See rollout/environments/base.py."),
        ("{folder}/mine.py:Stopless", "its `stop` is 'END', expected a tuple of strings such as () or ('</answer>',)."),
        ("{folder}/broken.py:Mine", "{folder}/broken.py cannot be loaded: ZeroDivisionError: division by zero"),
        ("no_such_module:Mine", "no_such_module cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_loading_says_what_is_missing(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(SettingsError) as caught:
        load_environment(name.format(folder=tmp_path))
    assert str(caught.value).startswith("settings: rollout.environment = ")
    assert problem.format(folder=tmp_path) in str(caught.value)


async def test_search_speaks_in_search_r1s_words_by_a_setting() -> None:
    passages = Passages('"Belarus"\na country\nin Europe', '"Minsk"\na city')
    environment = Search(Resources(3, {"search": passages.search}, search_words="search_r1"))
    steps = [await environment.step(Turn(text, "stop")) for text in ("<search>Belarus</search>", "Hm")]

    assert [step.observation.text for step in steps if isinstance(step.observation, Observation)] == [
        '\n\n<information>Doc 1(Title: "Belarus") a country\nin Europe\nDoc 2(Title: "Minsk") a city</information>\n\n',
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me "
        "try again.\n",
    ]
