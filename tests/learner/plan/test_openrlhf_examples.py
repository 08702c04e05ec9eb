"""docs/do/openrlhf_examples.md: `--plan` draws each of its commands, without machines, models or a network."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.command import run_verb

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "do" / "openrlhf_examples.md"
# What the page says of the reader's files.
_MINE = {f"my_{name}.yaml": f"deploy/configs/{name}.yaml" for name in ("sft", "dpo")}
_CHANGES = ["--learner.num_ranks=8", "--learner.zero_stage=3", "--learner.gradient_checkpointing=true"]


class Example(NamedTuple):
    name: str
    cluster: str  # file that describes machines and model
    command: list[str]  # verb and its arguments


def examples() -> Iterator[Example]:
    """Yield each command of the page with the description that the text before it names."""
    text = PAGE.read_text("utf-8")
    cluster, name = "", ""
    for line in re.sub(r" \\\n\s*", " ", text).splitlines():
        if found := re.search(r"`(deploy/configs/plans/\w+\.yaml)`", line):
            cluster = found[1]
        elif line.startswith("# "):
            name = line[2:]
        elif line.startswith("sluice "):
            of_70b = re.search(r"plans/70b_(\d)_nodes", line)
            own = f"deploy/configs/plans/h100_{of_70b[1]}_nodes.yaml" if of_70b else cluster
            yield Example(name, own, shlex.split(line)[1:])


def drawn(command: list[str]) -> list[list[str]]:
    """Return the commands that can be drawn: of `iterate` its two parts, of `select` and `chat` none."""
    verb, *rest = command
    if verb == "iterate":
        given = dict(pairwise(rest))
        trained = ["run", "--config", given["--train"], "--policy.model", rest[0], "--data.train", "rows.jsonl"]
        generated = ["generate", *rest[:2], "answers.jsonl", "--config", given["--generate"]]
        return [*drawn(generated), *drawn(trained)]
    for copy, config in _MINE.items():
        if copy in rest:
            place = rest.index(copy)
            rest = [*rest[:place], config, *_CHANGES, *rest[place + 1 :]]
    return [[verb, *rest]] if verb in ("run", "generate") else []


EXAMPLES = list(examples())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.command[0]} {example.name}")
def test_an_example_is_drawn_within_its_machines_memory(
    example: Example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    for command in drawn(example.command):
        assert run_verb([*command, "--plan", "--cluster", example.cluster]) == 0
        told = capsys.readouterr()
        assert "In all: " in told.out, told.err
        assert "run out of memory" not in told.out


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) >= 24
    assert {example.command[0] for example in EXAMPLES} == {"run", "iterate", "generate", "select", "chat"}
