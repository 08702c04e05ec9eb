"""Demonstrations of the search loop for the warm start, in training order.

Most demonstrations are about invented entities: their names and codes are not in the corpus and can only be copied
from question and passage. Held-out entities need that skill. The last part shows a careless searcher (guesses, reads
the wrong field): reinforcement learning has to discover that care pays.
"""

import random
import string
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from deploy.quickstart import passages
from deploy.quickstart.facts import LANGUAGE_STATUS, MAX_NAME_CHARS, Entity
from deploy.quickstart.questions import ASKED, CODES, Question, one_hop, two_hop

POLICY_WEIGHT = 1.0
PASSAGE_WEIGHT = 0.3
KIND_WEIGHTS = (25, 35, 10, 30)  # of one-hop demonstrations, in ASKED's order


@dataclass(frozen=True)
class Recipe:
    """Number of demonstrations, and errors of the last ones."""

    num_rows: int = 27_200  # 850 steps of 32
    invented_share: float = 0.7  # share of demonstrations about invented entities, 0 to 1
    two_hop_share: float = 0.25  # share of demonstrations with two searches
    careless_from: float = 0.88  # share of num_rows after which demonstrations are careless
    guess_share: float = 0.60  # share of careless ones that answer without a search
    wrong_field_share: float = 0.20  # share of those with a search that read another field


Segment = dict[str, object]  # {"text": str, "weight": float}
Row = dict[str, list[Segment]]


def demonstrations(
    known: Sequence[Entity], real_names: Collection[str], recipe: Recipe, rng: random.Random
) -> Iterator[Row]:
    """Yield `recipe.num_rows` rows {"segments": [{"text", "weight"}, ...]}.

    known: the warm-start split's entities. real_names: names of all splits, which no invented entity gets: so no
    demonstration is about a held-out entity.
    """
    source = _Source(known, real_names, rng)
    for number in range(recipe.num_rows):
        careless = number >= recipe.careless_from * recipe.num_rows
        task = _draw_task(source, recipe, rng)
        yield {"segments": _careless(task, recipe, source, rng) if careless else _careful(task)}


@dataclass(frozen=True)
class _Task:
    """Content of a demonstration."""

    question: Question
    field: str
    chain: tuple[Entity, ...]  # entities to search for, in order; the last one has the fact


def _draw_task(source: "_Source", recipe: Recipe, rng: random.Random) -> _Task:
    invented = rng.random() < recipe.invented_share
    if rng.random() < recipe.two_hop_share:
        subdivision, country = source.pair(invented)
        field = rng.choice(CODES)
        return _Task(two_hop(subdivision, country, field), field, (subdivision, country))
    entity = source.single(invented)
    field = rng.choice(ASKED[entity.kind])
    return _Task(one_hop(entity, field), field, (entity,))


def _careful(task: _Task) -> list[Segment]:
    searches = [segment for entity in task.chain for segment in _search(entity)]
    return [_segment(task.question.prompt, 0.0), *searches, _answer(task.question.label)]


def _careless(task: _Task, recipe: Recipe, source: "_Source", rng: random.Random) -> list[Segment]:
    """Return a demonstration that may guess or read another field."""
    asked = task.chain[-1]
    if rng.random() < recipe.guess_share:
        guess = source.single(invented=True, kind=asked.kind).value(task.field)
        return [_segment(task.question.prompt, 0.0), _answer(guess)]
    field = task.field
    if rng.random() < recipe.wrong_field_share:
        field = rng.choice([other for other, _ in asked.fields if other != field])
    return _careful(_Task(replace(task.question, label=asked.value(field)), field, task.chain))


def _search(entity: Entity) -> list[Segment]:
    query = passages.search(f"{entity.kind} {entity.name}")
    found = passages.observation([passages.contents(entity)])
    return [_segment(query, POLICY_WEIGHT), _segment(found, PASSAGE_WEIGHT)]


def _answer(text: str) -> Segment:
    return _segment(passages.answer(text), POLICY_WEIGHT)


def _segment(text: str, weight: float) -> Segment:
    return {"text": text, "weight": weight}


class _Source:
    """Entities of demonstrations: from the warm-start split, or invented ones like them."""

    def __init__(self, known: Sequence[Entity], real_names: Collection[str], rng: random.Random) -> None:
        self._rng = rng
        self._by_kind: dict[str, list[Entity]] = defaultdict(list)
        for entity in known:
            self._by_kind[entity.kind].append(entity)
        self._countries = {entity.name: entity for entity in self._by_kind["country"]}
        self._real_names = {name.lower() for name in real_names}
        self._words = _WordMaker([word for entity in known for word in entity.name.split()], rng)
        self._kinds = list(ASKED)

    def single(self, invented: bool, kind: str | None = None) -> Entity:
        kind = kind or self._rng.choices(self._kinds, weights=KIND_WEIGHTS)[0]
        return self._invent(kind) if invented else self._rng.choice(self._by_kind[kind])

    def pair(self, invented: bool) -> tuple[Entity, Entity]:
        if invented:
            country = self._invent("country")
            return self._invent("subdivision", country), country
        while True:
            subdivision = self._rng.choice(self._by_kind["subdivision"])
            if subdivision.value("in") in self._countries:
                return subdivision, self._countries[subdivision.value("in")]

    def _invent(self, kind: str, country: Entity | None = None) -> Entity:
        name = self._words.name()
        while name.lower() in self._real_names:
            name = self._words.name()
        if kind == "subdivision":
            return self._invent_subdivision(name, country or self._invent("country"))
        fields: tuple[tuple[str, str], ...]
        if kind == "country":
            fields = (("alpha-2", self._letters(2)), ("alpha-3", self._letters(3)), ("numeric", self._digits(3)))
        elif kind == "currency":
            fields = (("alpha-3", self._letters(3)), ("numeric", self._digits(3)))
        else:
            status = self._rng.choice(list(LANGUAGE_STATUS.values()))
            fields = (("alpha-3", self._letters(3).lower()), ("status", status))
        return Entity(f"invented-{kind}", kind, name, fields, "invented")

    def _invent_subdivision(self, name: str, home: Entity) -> Entity:
        resembled = self._rng.choice(self._by_kind["subdivision"])
        suffix = "".join(self._like(character) for character in resembled.value("code").partition("-")[2])
        fields = (
            ("code", f"{home.value('alpha-2')}-{suffix}"),
            ("type", resembled.value("type")),
            ("in", home.name),
        )
        return Entity("invented-subdivision", "subdivision", name, fields, "invented")

    def _like(self, character: str) -> str:
        """Return a random digit for a digit and a random letter for a letter: codes keep the shapes of real ones."""
        return self._digits(1) if character.isdigit() else self._letters(1)

    def _letters(self, count: int) -> str:
        return "".join(self._rng.choices(string.ascii_uppercase, k=count))

    def _digits(self, count: int) -> str:
        return "".join(self._rng.choices(string.digits, k=count))


class _WordMaker:
    """Makes words from a letter model of order two over the given words."""

    def __init__(self, words: Sequence[str], rng: random.Random) -> None:
        self._rng = rng
        self._next: dict[str, list[str]] = defaultdict(list)
        for word in words:
            padded = f"^^{word}$"
            for i in range(2, len(padded)):
                self._next[padded[i - 2 : i]].append(padded[i])

    def name(self) -> str:
        words = [self._word() for _ in range(self._rng.choices((1, 2, 3), weights=(60, 32, 8))[0])]
        while len(" ".join(words)) > MAX_NAME_CHARS:
            words.pop()
        return " ".join(words) or "Oro"

    def _word(self) -> str:
        letters = "^^"
        while True:
            letter = self._rng.choice(self._next[letters[-2:]])
            if letter == "$":
                break
            letters += letter
        return letters[2:16].strip("'.-/&") or "Una"
