"""The texts of the search loop: what a passage, a query, an observation and an answer look like.

Called by `corpus` and `demonstrations`. The `search` environment of the rollout room writes observations in the same
form, so that a demonstration has the very tokens that the policy will see and write later.
"""

import re
from collections.abc import Sequence

from deploy.quickstart.facts import Entity

TAGS = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")


def contents(entity: Entity) -> str:
    r"""Return the entity's passage as the corpus holds it: the title quoted on the first line, then the text.

    Example: `"Belarus"\ncountry; alpha-2 BY; alpha-3 BLR; numeric 112.`
    """
    facts = "; ".join(f"{field} {value}" for field, value in entity.fields)
    return f'"{entity.name}"\n{entity.kind}; {facts}.'


def render_passages(passages: Sequence[str]) -> str:
    """Return what stands between the information tags: one line ` Title: text` for each passage's contents.

    Every word has a space before it, so that it has the same tokens here as in a question, a query and an answer.
    """
    return "\n".join(_render(passage) for passage in passages) or " Nothing was found."


def observation(passages: Sequence[str]) -> str:
    """Return the environment's reply to a search."""
    return f"<information>{render_passages(passages)}</information>"


def search(query: str) -> str:
    """Return a model turn that searches."""
    return f"<search> {query}</search>"


def answer(text: str) -> str:
    """Return a model turn that answers."""
    return f"<answer> {text}</answer>"


def _render(passage: str) -> str:
    titled = re.match(r'"(.*)"\n(.*)', passage, flags=re.DOTALL)
    if titled is None:
        return f" {passage.strip()}"
    return f" {titled[1].strip()}: {titled[2].strip()}"
