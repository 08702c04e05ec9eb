"""Writes the task's files into a folder."""

import itertools
import random
from pathlib import Path

from deploy.quickstart.build import write_rows
from deploy.quickstart.policy import EOS, write_policy
from tests.benchmarks.tool_task.products import (
    ASSISTANT,
    TAGS,
    TOOL,
    USER,
    Recipe,
    call,
    chat_template,
    demonstrations,
    split_products,
)

_NUM_EVAL = 512


def build_tool_task(out: Path, seed: int, recipe: Recipe | None = None) -> dict[str, int]:
    """Write the files; returns the number of rows of each. Raises: OSError."""
    splits = split_products(seed)
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"demonstrations {seed}")
    rows = demonstrations(splits["warmstart"], recipe or Recipe(), rng, EOS)
    counts = {
        "train": write_rows(out / "train.jsonl", (product.row() for product in splits["train"])),
        "eval": write_rows(out / "eval.jsonl", (product.row() for product in splits["eval"][:_NUM_EVAL])),
        "warmstart": write_rows(out / "warmstart.jsonl", rows),
    }
    known = list(itertools.islice(splits["warmstart"], 1000))
    texts = [text for product in known for text in (product.prompt, call(product.expression))]
    controls = (USER, TOOL, ASSISTANT)
    write_policy(out / "model", texts, seed, tags=TAGS, controls=controls, chat_template=chat_template(EOS))
    return counts
