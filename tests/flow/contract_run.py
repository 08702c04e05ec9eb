"""Runs of two steps with what users bring from other systems: their model, files, rows and what the policy is taught.

They share one engine: their model and limits are the same. The model speaks in Hermes's form, and pieces of a call are
tokens of its own, so that seconds of supervised fine-tuning teach it to make one.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tokenizers import AddedToken

from learner import audit
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.tool_models import FAMILIES
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import GROUP_SIZE, GROUPS_PER_STEP, Bring, Left

HERMES = FAMILIES["hermes"]
NUM_ROWS = 16
QUESTION = "who wrote it"
_PIECES = ('<tool_call>\n{"name": "', '", "arguments": {"', '": "', '"}}\n</tool_call>')


def tokenizer() -> Any:
    """Return that of the model: Hermes's, with what stands between the words of a call as tokens."""
    made = HERMES.tokenizer()
    made.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in _PIECES])
    return made


def chatting_user(folder: Path, reward_url: str) -> Bring:
    """Return a user whose model speaks in Hermes's form, now in `folder`."""
    model = make_tiny_model(folder / "model", tied=True, width=0.03)
    made = tokenizer()
    made.save_pretrained(model)
    for name in ("config.json", "generation_config.json"):
        written = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**written, "eos_token_id": made.eos_token_id}))
    return Bring(folder, model, reward_url)


def ran(
    cluster: FlowCluster,
    user: Bring,
    name: str,
    given: Mapping[str, object],
    taught: Sequence[Sequence[str]] = (),
    num_groups: int = GROUPS_PER_STEP,
) -> Left:
    """Return what a run of two steps left, once the audit has passed.

    taught: conversations: the prompt, as the template writes it, what the policy is taught to write behind it, what it
    then reads, and so on. num_groups: of a step.
    """
    limits = {"max_response_tokens": 80, "max_context_tokens": 1024, "max_turns": 2}
    overrides: dict[str, object] = {f"rollout.{key}": str(value) for key, value in limits.items()}
    overrides |= {"run.max_steps": "2", "rollout.temperature": "0.3", "data.eval": "null"}
    overrides |= {"report.samples_per_step": "24", "learner.groups_per_step": str(num_groups), **given}
    if taught:
        sft = user.folder / f"{name}_sft.jsonl"
        sft.write_text(lines([{"segments": _taught(spoken)} for spoken in taught]))
        warm = {"data": str(sft), "max_steps": "120", "rows_per_step": "1", "lr": "0.003", "lr_warmup_steps": "10"}
        overrides |= {f"policy.warm_start.{key}": value for key, value in warm.items()}
    command = cluster.run(*user.options(name, overrides))
    assert command.returncode == 0, command.stdout + command.stderr
    left = user.left(name)
    assert left.trained == dict.fromkeys((1, 2), (num_groups, num_groups * GROUP_SIZE))
    assert audit.main([str(left.folder)]) == 0
    return left


def call(name: str, argument: str, value: str) -> str:
    """Return a turn that calls a tool, with its end."""
    return HERMES.call.format(name=name, arguments=json.dumps({argument: value})) + HERMES.end


def prompts(tools: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
    """Return some of the prompts of `parquet`'s rows, as the template writes them."""
    render = HERMES.tokenizer().apply_chat_template
    chats = [[{"role": "user", "content": question(number)}] for number in range(0, NUM_ROWS, 4)]
    return [render(chat, tools=tools, add_generation_prompt=True, tokenize=False) for chat in chats]


def question(number: int) -> str:
    return QUESTION + "?" * number


def parquet(path: Path, source: str, truth: Any) -> Path:
    """Write rows as verl and Search-R1 prepare them."""
    told = {"guess": {"create_kwargs": {"ground_truth": "4"}}}
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": question(number)}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": number, "need_tools_kwargs": True, "tools_kwargs": told},
        }
        for number in range(NUM_ROWS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def written(folder: Path, **modules: str) -> Path:
    """Return `folder`, now with these Python files by name."""
    folder.mkdir()
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def calls(folder: Path) -> list[dict[str, Any]]:
    """Return what the plug-ins in a folder noted."""
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def texts(left: Left) -> list[str]:
    """Return the samples of a run as the policy read and wrote them."""
    read = tokenizer()
    return [read.decode(sample["tokens"]) for sample in left.samples]


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _taught(spoken: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row of supervised fine-tuning: every second text is the policy's."""
    return [{"text": text, "weight": float(place % 2)} for place, text in enumerate(spoken)]
