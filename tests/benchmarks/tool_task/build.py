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


def build_tool_task(out: Path, seed: int) -> None:
    """Write the files. Raises: OSError."""
    splits = split_products(seed)
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"demonstrations {seed}")
    rows = demonstrations(splits["warmstart"], Recipe(), rng, EOS)
    write_rows(out / "train.jsonl", (product.row() for product in splits["train"]))
    write_rows(out / "eval.jsonl", (product.row() for product in splits["eval"][:_NUM_EVAL]))
    write_rows(out / "warmstart.jsonl", rows)
    known = list(itertools.islice(splits["warmstart"], 1000))
    texts = [text for product in known for text in (product.prompt, call(product.expression))]
    controls = (USER, TOOL, ASSISTANT)
    write_policy(out / "model", texts, seed, tags=TAGS, controls=controls, chat_template=chat_template(EOS))
