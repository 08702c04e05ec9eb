"""The quick start's facts and questions: real, normalised, unambiguous, split by entity."""

import json
import random
from pathlib import Path

import pytest

from deploy.quickstart.facts import Entity, load_entities, plain_name
from deploy.quickstart.passages import contents, observation
from deploy.quickstart.questions import questions, split_entities, unambiguous
from retriever.corpus import read_corpus
from retriever.indexes.bm25 import Bm25Index


@pytest.fixture(scope="module")
def entities() -> list[Entity]:
    return load_entities()


def test_plain_name_is_ascii_and_cut_at_a_bracket_or_comma() -> None:
    assert plain_name("Bolivia, Plurinational State of") == "Bolivia"
    assert plain_name("Côte d'Ivoire") == "Cote d'Ivoire"
    assert plain_name("Moskva (city)") == "Moskva"
    assert plain_name("Syunik'") == "Syunik"


def test_entities_hold_the_facts_of_the_iso_lists(entities: list[Entity]) -> None:
    belarus = next(entity for entity in entities if entity.id == "country-BY")
    assert belarus.name == "Belarus"
    assert belarus.fields == (("alpha-2", "BY"), ("alpha-3", "BLR"), ("numeric", "112"))


def test_every_name_and_value_is_short_ascii(entities: list[Entity]) -> None:
    texts = [text for entity in entities for text in (entity.name, *dict(entity.fields).values())]
    assert max(len(text) for text in texts) == 28
    assert all(text.isascii() for text in texts)


def test_a_country_and_its_subdivisions_share_a_split(entities: list[Entity]) -> None:
    splits = split_entities(entities, seed=3)
    clusters = {name: {entity.cluster for entity in members} for name, members in splits.items()}
    assert sum(len(members) for members in splits.values()) == len(entities)
    assert not clusters["warmstart"] & clusters["train"]
    assert not clusters["warmstart"] & clusters["eval"]
    assert not clusters["train"] & clusters["eval"]


def test_split_takes_60_25_and_15_per_cent_of_the_clusters(entities: list[Entity]) -> None:
    splits = split_entities(entities, seed=3)
    total = len({entity.cluster for entity in entities})
    shares = [round(len({entity.cluster for entity in members}) / total, 2) for members in splits.values()]
    assert shares == [0.60, 0.25, 0.15]


def test_entities_with_the_same_kind_and_name_are_not_askable() -> None:
    same = [
        Entity(f"language-{i}", "language", name, (("alpha-3", "abc"),), str(i))
        for i, name in enumerate(("Koro", "koro", "Ari"))
    ]
    assert unambiguous(same) == {"language-2"}


def test_questions_have_the_asked_share_of_two_hops(entities: list[Entity]) -> None:
    held_out = split_entities(entities, seed=3)["eval"]
    asked = questions(held_out, unambiguous(entities), 0.125, random.Random(0))
    share = sum(question.kind == "two_hop" for question in asked) / len(asked)
    assert share == pytest.approx(0.125, abs=0.001)


def test_a_two_hop_question_asks_for_a_code_of_the_country() -> None:
    country = Entity(
        "country-AD", "country", "Andorra", (("alpha-2", "AD"), ("alpha-3", "AND"), ("numeric", "020")), "AD"
    )
    parish = Entity("s", "subdivision", "Canillo", (("code", "AD-02"), ("type", "parish"), ("in", "Andorra")), "AD")
    asked = questions([country, parish], {"country-AD", "s"}, 3 / 7, random.Random(0))
    two_hops = sorted((q.prompt, q.label) for q in asked if q.kind == "two_hop")
    assert two_hops == [
        ("What is the alpha-2 code of the country of the subdivision Canillo?", "AD"),
        ("What is the alpha-3 code of the country of the subdivision Canillo?", "AND"),
        ("What is the numeric code of the country of the subdivision Canillo?", "020"),
    ]


def test_a_label_that_exact_match_would_empty_is_not_asked() -> None:
    anland = Entity("c", "country", "Anland", (("alpha-2", "AN"), ("alpha-3", "ANL"), ("numeric", "001")), "AN")
    labels = {question.label for question in questions([anland], {"c"}, 0.1, random.Random(0))}
    assert labels == {"ANL", "001"}


def test_passage_is_rendered_as_title_and_text() -> None:
    belarus = Entity("c", "country", "Belarus", (("alpha-2", "BY"),), "BY")
    assert contents(belarus) == '"Belarus"\ncountry; alpha-2 BY.'
    assert observation([contents(belarus)]) == "<information> Belarus: country; alpha-2 BY.</information>"


def test_ideal_query_finds_its_passage_first_for_all_but_a_few_in_a_thousand(
    entities: list[Entity], tmp_path: Path
) -> None:
    corpus_path = tmp_path / "corpus.jsonl"
    rows = [{"id": entity.id, "contents": contents(entity)} for entity in entities]
    corpus_path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = read_corpus(corpus_path, tmp_path)
    index = Bm25Index.build(corpus)
    askable = unambiguous(entities)
    asked = [entity for entity in entities if entity.id in askable]
    hits_of = index.search([f"{entity.kind} {entity.name}" for entity in asked], 1)
    found = [corpus.ids[hits[0].row] == entity.id for entity, hits in zip(asked, hits_of, strict=True)]
    assert sum(found) / len(found) > 0.998
