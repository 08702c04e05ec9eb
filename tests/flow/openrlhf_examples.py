"""Tiny forms of the commands of docs/do/openrlhf_examples.md, on a cluster of their own: two steps each, on CPUs.

python -m tests.flow.openrlhf_examples [WORD ..]     WORD: a part of an example's name; none: all, some six minutes

What a command says of its objective, algorithm, roles and memory stays; models, data, lengths and numbers of processes
become small. `sluice chat` is left out: tests/rollout/test_chat.py.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import Qwen2ForSequenceClassification

from tests.fakes.http_servers import scripted_server
from tests.fakes.tiny_models import byte_tokenizer, make_tiny_mixture, make_tiny_model, tiny_config
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Left, score
from tests.learner.plan.test_openrlhf_examples import EXAMPLES, ROOT, Example

_MODULES = {
    "run": "learner.run",
    "generate": "learner.generation.generate",
    "select": "learner.generation.select",
    "iterate": "learner.generation.iterate",
}
_SMALL: dict[str, Any] = {
    "policy.dtype": "float32",
    "learner.num_ranks": 1,
    "learner.lr": 1e-3,
    "learner.groups_per_step": 8,
    "learner.micro_batch_tokens": 512,
    "learner.checkpoint_every_steps": 0,
}
_SMALL_PLACES = {"rollout.num_servers": 1, "rollout.tensor_parallel_size": 1, "rollout.engine_args": {}}
_SMALL_ROLLOUTS: dict[str, Any] = {
    **_SMALL_PLACES,
    "rollout.max_response_tokens": 16,
    "rollout.max_context_tokens": 128,
    "data.max_prompt_tokens": 64,
    "data.prompt_key": "prompt",
}


def main(words: Sequence[str]) -> int:
    """Run the examples; returns 1 after one that failed."""
    chosen = [each for each in EXAMPLES if not words or any(word in each.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="sluice-examples") as name, _user(Path(name)) as (cluster, endpoints):
        results = [_play(cluster, Path(name), example, number, endpoints) for number, example in enumerate(chosen)]
    return int(not all(results))


def _play(cluster: FlowCluster, folder: Path, example: Example, number: int, endpoints: str) -> bool:
    verb, *rest = example.command
    if verb == "chat":
        return True
    started = time.monotonic()
    left = Left(folder / "runs" / str(number))
    done = cluster.command(_MODULES[verb], *_small(folder, verb, rest, number, endpoints), timeout_s=600.0)
    if verb == "iterate":
        left = Left(folder / "rounds" / example.name / "round_1" / "train")
    steps = [line for line in left.metrics if "policy/loss" in line]
    losses = ", ".join(f"{line['policy/loss']:.4f}" for line in steps)
    is_whole = done.returncode == 0 and (verb in ("generate", "select") or bool(steps))
    result = f"losses {losses}" if steps else done.stdout.strip().rpartition("\n")[2]
    print(f"{'ok' if is_whole else 'FAILED'} | {verb} {example.name} | {result} | {time.monotonic() - started:.0f} s")
    if not is_whole:
        print(done.stdout[-2000:], done.stderr[-3000:])
    return is_whole


def _small(folder: Path, verb: str, rest: list[str], number: int, endpoints: str) -> list[str]:
    """Return the arguments of a command in its tiny form."""
    if verb == "select":
        return [str(folder / rest[0]), str(folder / rest[1]), *rest[2:]]
    model, prompts = str(folder / "model"), str(folder / "prompts.jsonl")
    options = {name: value for name, value in pairwise(rest) if name.startswith("--")}
    if verb == "iterate":
        parts = {"--generate": _SMALL_ROLLOUTS, "--train": {}}
        own = [part for name, small in parts.items() for part in (name, _written(folder, options[name], small))]
        samples = ["--rounds", "1", "--samples", "3", "--select", options["--select"]]
        name = next(each.name for each in EXAMPLES if each.command[1:] == rest)
        return [model, prompts, str(folder / "rounds" / name), *samples, *own]
    config = _config(options.pop("--config"))
    given = yaml.safe_load(config.read_text("utf-8"))
    objective = options.get("--objective", given.get("objective", "policy_gradient"))
    is_of_rows = objective != "policy_gradient"
    small = {**_SMALL, **({} if is_of_rows else _SMALL_ROLLOUTS)}
    if verb == "generate":
        small["rollout.max_response_tokens"] = 64  # long enough that some samples end
        own = ["--config", str(config), "--samples", "8"]
        return [model, prompts, str(folder / rest[2]), *own, *_texts(small)]
    small |= {"run.dir": folder / "runs", "run.name": str(number), **_length(is_of_rows)}
    small["policy.model"] = folder / ("mixture" if "--policy.lora.rank" in options else "model")
    small["data.train"] = folder / _data(options.get("--data.train", "prompts.jsonl"))
    small |= {"critic.model": folder / "rm"} if "--critic.model" in options else {}
    small |= {"reference.model": folder / "teacher"} if "--reference.model" in options else {}
    small |= {"rewards.endpoints": endpoints} if "--rewards.endpoints" in options else {}
    if "70b_" in config.name:
        small |= {"data.eval": folder / "held_out.jsonl", "eval.every_steps": 2, "rollout.group_size": 2}
        roles = given["placement"].keys() & {"ranks", "servers"}
        small |= {f"placement.{role}.{name}": None for role in roles for name in ("nodes", "gpus_per_node")}
    kept = {name.removeprefix("--"): value for name, value in options.items()}
    return ["--config", str(config), *_texts({**kept, **small})]


def _length(is_of_rows: bool) -> dict[str, int]:
    """Return the setting for two steps: the files of rows have two steps of rows."""
    return {"run.max_epochs": 1} if is_of_rows else {"run.max_steps": 2}


def _data(name: str) -> str:
    return f"{'pairs' if 'preference' in name else 'prompts'}.jsonl" if name.startswith("hf:") else name


def _texts(settings: dict[str, Any]) -> list[str]:
    texts = {key: str(each) if isinstance(each, str | Path) else json.dumps(each) for key, each in settings.items()}
    return [part for key, text in texts.items() for part in (f"--{key}", text)]


def _config(name: str) -> Path:
    return ROOT / (f"deploy/configs/{name.removeprefix('my_')}" if name.startswith("my_") else name)


def _written(folder: Path, config: str, small: dict[str, Any]) -> str:
    """Return the path of a copy of a settings file with small values."""
    settings = yaml.safe_load(_config(config).read_text("utf-8"))
    for name, value in {**_SMALL, **small}.items():
        section, _, key = name.partition(".")
        settings.setdefault(section, {})[key] = value
    if "objective" in settings:
        settings["run"]["max_epochs"] = 1
    path = folder / f"small_{Path(config).name}"
    path.write_text(yaml.safe_dump(settings), "utf-8")
    return str(path)


@contextmanager
def _user(folder: Path) -> Iterator[tuple[FlowCluster, str]]:
    """Yield a cluster that serves a reward model, and two reward services as endpoints; write models and data."""
    make_tiny_model(folder / "model", tied=True)
    make_tiny_model(folder / "teacher", tied=True, seed=1)
    make_tiny_mixture(folder / "mixture")
    torch.manual_seed(2)
    Qwen2ForSequenceClassification(tiny_config(num_labels=1)).save_pretrained(folder / "rm")
    byte_tokenizer().save_pretrained(folder / "rm")
    for name, row in _ROWS.items():
        lines = [json.dumps({key: _filled(each, i) for key, each in row.items()}) + "\n" for i in range(16)]
        (folder / name).write_text("".join(lines), "utf-8")
    cluster = FlowCluster(folder)
    with scripted_server() as server:
        urls = [server.script_by(name, score) for name in ("m1", "m2")]
        try:
            scorer = ("--reward-scorer", f"reward_model:{folder / 'rm'}")
            started = cluster.start(*scorer, "--resources", '{"h100": 8, "a100": 8}')
            assert started.returncode == 0, started.stderr
            yield cluster, json.dumps([{"name": f"m{i}", "url": url} for i, url in enumerate(urls, 1)])
        finally:
            cluster.stop()


_ROWS: dict[str, dict[str, Any]] = {
    "prompts.jsonl": {"prompt": "a{} =", "context_messages": "a{} =", "label": ""},
    "held_out.jsonl": {"prompt": "h{} =", "label": "1"},
    "orca.jsonl": {"prompt": "{} + 1 =", "response": " b{}"},
    "texts.jsonl": {"text": "document number {}"},
    "pairs.jsonl": {"prompt": "{} + 1 =", "chosen": " b{}", "rejected": " c{} !"},
    "labelled.jsonl": {"prompt": "{} + 1 =", "completion": " b{}", "label": None},
}


def _filled(value: Any, number: int) -> Any:
    return value.format(number) if value is not None else bool(number % 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
