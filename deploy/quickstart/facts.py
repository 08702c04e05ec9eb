"""The facts of the quick start: ISO countries, subdivisions, currencies and languages as entities with named fields.

All data comes from the `pycountry` package.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

MAX_NAME_CHARS = 28
LANGUAGE_STATUS = {"L": "living", "E": "extinct", "H": "historical", "C": "constructed", "S": "special"}


@dataclass(frozen=True)
class Entity:
    """One thing that can be asked about.

    Example: Entity("country-BY", "country", "Belarus", (("alpha-2", "BY"), ("alpha-3", "BLR")), "BY")
    """

    id: str  # kind and code, such as country-BY
    kind: str  # country, subdivision, currency or language
    name: str  # plain name, as in questions and passages
    fields: tuple[tuple[str, str], ...]  # (name, value) of each fact, in the passage's order
    cluster: str  # group of entities that share a split: a country and its subdivisions

    def value(self, field: str) -> str:
        """Return the value of `field`. Raises: KeyError when this entity has no such field."""
        return dict(self.fields)[field]


def load_entities() -> list[Entity]:
    """Return the entities whose name and field values all have 1 to 28 characters, in the package's order."""
    import pycountry

    countries = {country.alpha_2: plain_name(country.name) for country in pycountry.countries}
    entities = [_country(country) for country in pycountry.countries]
    entities += [_subdivision(subdivision, countries) for subdivision in pycountry.subdivisions]
    entities += [_currency(currency) for currency in pycountry.currencies]
    entities += [_language(language) for language in pycountry.languages]
    return [entity for entity in entities if all(0 < len(text) <= MAX_NAME_CHARS for text in _texts(entity))]


def plain_name(name: str) -> str:
    """Return `name` in ASCII, cut at the first bracket or comma, without punctuation at its end.

    Example: "Bolivia, Plurinational State of" gives "Bolivia"; "Côte d'Ivoire" gives "Cote d'Ivoire".
    """
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode("ascii")
    cut = re.split(r"[(\[,]", ascii_name)[0]
    return re.sub(r"\s+", " ", cut).strip(" '.-/&")


def _texts(entity: Entity) -> list[str]:
    return [entity.name, *(value for _, value in entity.fields)]


def _country(country: Any) -> Entity:
    fields = (("alpha-2", country.alpha_2), ("alpha-3", country.alpha_3), ("numeric", country.numeric))
    return Entity(f"country-{country.alpha_2}", "country", plain_name(country.name), fields, country.alpha_2)


def _subdivision(subdivision: Any, countries: dict[str, str]) -> Entity:
    country = countries[subdivision.country_code]
    fields = (("code", subdivision.code), ("type", plain_name(subdivision.type).lower()), ("in", country))
    name = plain_name(subdivision.name)
    return Entity(f"subdivision-{subdivision.code}", "subdivision", name, fields, subdivision.country_code)


def _currency(currency: Any) -> Entity:
    fields = (("alpha-3", currency.alpha_3), ("numeric", currency.numeric))
    id_ = f"currency-{currency.alpha_3}"
    return Entity(id_, "currency", plain_name(currency.name), fields, id_)


def _language(language: Any) -> Entity:
    fields = (("alpha-3", language.alpha_3), ("status", LANGUAGE_STATUS[language.type]))
    id_ = f"language-{language.alpha_3}"
    return Entity(id_, "language", plain_name(language.name), fields, id_)
