"""The texts of the search loop: passage, query, observation and answer.

The `search` environment's own functions write the observations: the policy reads the same text later.
"""

from collections.abc import Sequence

from deploy.quickstart.facts import Entity
from rollout.environments.search import information, render_passages

TAGS = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")


def contents(entity: Entity) -> str:
    r"""Return the entity's passage as the corpus holds it: the title quoted on the first line, then the text.

    Example: `"Belarus"\ncountry; alpha-2 BY; alpha-3 BLR; numeric 112.`
    """
    facts = "; ".join(f"{field} {value}" for field, value in entity.fields)
    return f'"{entity.name}"\n{entity.kind}; {facts}.'


def observation(passages: Sequence[str]) -> str:
    """Return the environment's reply to a search."""
    return information(render_passages(passages)).text


def search(query: str) -> str:
    """Return a model turn that searches."""
    return f"<search> {query}</search>"


def answer(text: str) -> str:
    """Return a model turn that answers."""
    return f"<answer> {text}</answer>"
