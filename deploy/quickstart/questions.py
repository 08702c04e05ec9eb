"""Questions about the facts, split by entity into warm start, training and held-out."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from deploy.quickstart.facts import Entity

SPLITS = {"warmstart": 0.60, "train": 0.25, "eval": 0.15}
# Not a subdivision's own code: the warm start does not teach to copy "MK-307" digit by digit.
ASKED = {
    "country": ("alpha-2", "alpha-3", "numeric"),
    "subdivision": ("in",),
    "currency": ("alpha-3", "numeric"),
    "language": ("alpha-3",),
}
CODES = ("alpha-2", "alpha-3", "numeric")
ARTICLES = ("a", "an", "the")  # exact match drops them: such a label would equal an empty answer


@dataclass(frozen=True)
class Question:
    """A row of a data set."""

    prompt: str
    label: str
    kind: str  # one_hop: needs one search; two_hop: needs two
    entity: str  # id of the named entity

    def row(self) -> dict[str, str]:
        """Return the question as a data-set row."""
        return asdict(self)


def split_entities(entities: Sequence[Entity], seed: int) -> dict[str, list[Entity]]:
    """Return the entities of each split. A country and all its subdivisions share a split, so that both passages that
    a held-out two-hop question needs are held-out."""
    clusters = sorted({entity.cluster for entity in entities})
    random.Random(f"split {seed}").shuffle(clusters)  # noqa: S311 - reproducible choices, no secrets
    bounds = [0, *(round(share * len(clusters)) for share in accumulate(SPLITS.values()))]
    named = {name: set(clusters[bounds[i] : bounds[i + 1]]) for i, name in enumerate(SPLITS)}
    return {name: [entity for entity in entities if entity.cluster in named[name]] for name in SPLITS}


def unambiguous(entities: Sequence[Entity]) -> set[str]:
    """Return the ids of entities that are the only one of their kind with their name (any letter case)."""
    names = Counter((entity.kind, entity.name.lower()) for entity in entities)
    return {entity.id for entity in entities if names[entity.kind, entity.name.lower()] == 1}


def questions(
    entities: Sequence[Entity], askable: set[str], two_hop_share: float, rng: random.Random
) -> list[Question]:
    """Return one split's questions, shuffled: every one-hop question, and two-hop ones up to `two_hop_share` of all."""
    asked = [entity for entity in entities if entity.id in askable]
    singles = [one_hop(entity, field) for entity in asked for field in ASKED[entity.kind] if _is_fair(entity, field)]
    countries = {entity.name: entity for entity in asked if entity.kind == "country"}
    doubles = [
        two_hop(entity, countries[entity.value("in")], field)
        for entity in asked
        if entity.kind == "subdivision" and entity.value("in") in countries
        for field in CODES
        if _is_fair(countries[entity.value("in")], field)
    ]
    rng.shuffle(doubles)
    num_doubles = round(len(singles) * two_hop_share / (1 - two_hop_share))
    chosen = singles + doubles[:num_doubles]
    rng.shuffle(chosen)
    return chosen


def one_hop(entity: Entity, field: str) -> Question:
    """Return a question that needs one search for `entity`."""
    prompt = f"What is the {field_words(field)} of the {entity.kind} {entity.name}?"
    return Question(prompt, entity.value(field), "one_hop", entity.id)


def two_hop(subdivision: Entity, country: Entity, field: str) -> Question:
    """Return a question that needs a search for `subdivision`, then one for its `country`."""
    prompt = f"What is the {field_words(field)} of the country of the subdivision {subdivision.name}?"
    return Question(prompt, country.value(field), "two_hop", subdivision.id)


def field_words(field: str) -> str:
    """Return a field's name in a question."""
    return f"{field} code" if field in CODES else {"in": "country"}.get(field, field)


def _is_fair(entity: Entity, field: str) -> bool:
    return entity.value(field).lower() not in ARTICLES
