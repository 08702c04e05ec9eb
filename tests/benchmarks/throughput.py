"""Samples per second of a whole run on this machine at staleness 0 and 4, and those of TRL's GRPOTrainer beside it.

    uv pip install --target DIR --no-deps trl==1.16.0 accelerate datasets multiprocess dill xxhash pyarrow pandas \
        python-dateutil six pytz
    python -m tests.benchmarks.throughput [--trl DIR] [--repeats N] [--steps N] [--seed N] [--short]

The work: a random Qwen2-architecture model of 3.0M parameters (hidden 256, 4 layers, 128 tokens), prompts `a+b=`,
8 prompts x 8 samples a step, at most 256 new tokens at temperature 1, a reward that takes 0.5 s for each request; TRL
waits for it once a step. Needs a running cluster (deploy/start_cluster.sh --no-reward) on a quiet machine. Staleness 0,
staleness 4 and, with --trl, TRL (generation by transformers, two threads) take turns. A rate is from the end of the
first step to that of the last. Engines are compiled, as docs/do/slow.md says for long runs on CPUs. `--short` makes 6
steps of staleness 4 alone, once, with an engine that is not.
holds: staleness 4 reaches 17 samples/s; with --trl, 3.0 times TRL's rate, staleness 0 2.2 times, and staleness 0 has 75
% of the rate of staleness 4.
"""

import asyncio
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from protocol.node.home import sluice_home
from tests.benchmarks.cpu_by_part import cpu_per_sample
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import tiny_config

TARGET_SAMPLES_PER_S = 17.0
_TARGETS = {"staleness_4_over_trl": 3.0, "staleness_0_over_trl": 2.2, "staleness_0_over_4": 0.75}
_REWARD_DELAY_S = 0.5
_GROUPS, _GROUP_SIZE, _MOST_TOKENS = 8, 8, 256


def main() -> int:
    if len(sys.argv) == 5 and sys.argv[1] == "trl":
        return _train_with_trl(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    arguments = options(__doc__ or "", trl="", repeats=3, steps=12)
    repeats, num_steps = (1, 6) if arguments.short else (arguments.repeats, arguments.steps)
    compiled = {} if arguments.short else {"rollout__engine_args": '{"enforce_eager": false}'}
    sides = ["4"] if arguments.short else ["0", "4", *(["trl"] if arguments.trl else [])]
    rates = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder, reward_service() as url:
        work = Path(folder)
        make_model(work / "model", arguments.seed)
        make_prompts(work / "prompts.jsonl", arguments.seed)
        for turn in range(repeats):
            for side in sides:
                is_trl = side == "trl"
                rate, cpu = (
                    _measure_trl(work, arguments.trl, num_steps)
                    if is_trl
                    else measure(work, url, int(side), num_steps, arguments.seed, turn, **compiled)
                )
                rates[side].append(rate)
                parts = ", ".join(f"{part} {1000 * seconds:.1f}" for part, seconds in cpu.items())
                name = "TRL" if is_trl else f"staleness {side}"
                print(f"{name}: {rate:.1f} samples/s; ms of CPU per sample: {parts}", flush=True)
    of = {side: median(found) for side, found in rates.items()}
    figures = {side if side == "trl" else f"staleness_{side}": rate for side, rate in of.items()}
    gains = {}
    if "trl" in of:
        gains = {"staleness_4_over_trl": of["4"] / of["trl"], "staleness_0_over_trl": of["0"] / of["trl"]}
        gains["staleness_0_over_4"] = of["0"] / of["4"]
    holds = of["4"] >= TARGET_SAMPLES_PER_S and all(gain >= _TARGETS[name] for name, gain in gains.items())
    return conclude("throughput", holds, **figures, **gains, target=TARGET_SAMPLES_PER_S)


def measure(
    work: Path, reward_url: str, max_staleness: int, num_steps: int, seed: int, turn: int, **changes: object
) -> tuple[float, dict[str, float]]:
    """Return samples per second from the end of the first step to that of the last, and CPU seconds per sample.

    changes: as of `run_command`.
    """
    name = f"staleness-{max_staleness}-{turn}"
    command = [sys.executable, *run_command(work, name, reward_url, max_staleness, num_steps, seed, **changes)]
    metrics = work / "runs" / name / "metrics.jsonl"
    cpu = cpu_per_sample(command, Path.cwd(), os.environ, metrics, sluice_home())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = lines[-1]["time_s"] - lines[0]["time_s"]
    return sum(line["data/num_samples"] for line in lines[1:]) / float(seconds), cpu


def _measure_trl(work: Path, trl: str, num_steps: int) -> tuple[float, dict[str, float]]:
    result = work / "trl.json"
    command = [sys.executable, "-m", "tests.benchmarks.throughput", "trl", str(work), str(num_steps), str(result)]
    places = os.pathsep.join(filter(None, [str(Path.cwd()), trl, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    environment.pop("OMP_WAIT_POLICY", None)  # its default is quicker where nothing else runs
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    seconds, cpu_s = json.loads(result.read_text())
    num_samples = (num_steps - 1) * _GROUPS * _GROUP_SIZE
    return num_samples / seconds, {"all": cpu_s / num_samples}


def _train_with_trl(work: Path, num_steps: int, result: Path) -> int:
    """Train with TRL; write the seconds, and the CPU seconds, from the end of the first step to that of the last."""
    trl, datasets, transformers = (importlib.import_module(name) for name in ("trl", "datasets", "transformers"))
    ended_at: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended_at.append((time.monotonic(), time.process_time()))

    def share_of_digits(completions: list[str], **_: object) -> list[float]:
        time.sleep(_REWARD_DELAY_S)
        return [_share_of_digits(text) for text in completions]

    trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype="float32"),
        processing_class=transformers.AutoTokenizer.from_pretrained(work / "model"),
        train_dataset=datasets.load_dataset("json", data_files=str(work / "prompts.jsonl"), split="train"),
        reward_funcs=[share_of_digits],
        callbacks=[Clock()],
        args=trl.GRPOConfig(
            str(work / "trl"), max_steps=num_steps, per_device_train_batch_size=_GROUPS * _GROUP_SIZE,
            num_generations=_GROUP_SIZE, max_completion_length=_MOST_TOKENS, learning_rate=1e-5, use_cpu=True,
            bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[], logging_steps=1000,
        ),
    ).train()  # fmt: skip
    result.write_text(json.dumps([last - first for first, last in zip(ended_at[0], ended_at[-1], strict=True)]))
    return 0


def _share_of_digits(text: str) -> float:
    return sum(c.isdigit() for c in text) / max(1, len(text))


def run_command(
    work: Path, name: str, reward_url: str, max_staleness: int, num_steps: int, seed: int, **changes: object
) -> list[str]:
    """Return Python's arguments of a run below work/runs, whose model and prompts are in `work`.

    changes: other settings, as section__name.
    """
    settings = {
        "run.name": name,
        "run.dir": str(work / "runs"),
        "run.seed": seed,
        "run.max_steps": num_steps,
        "policy.model": str(work / "model"),
        "policy.dtype": "float32",
        "data.train": str(work / "prompts.jsonl"),
        "rollout.environment": "single_turn",
        "rollout.group_size": _GROUP_SIZE,
        "rollout.max_response_tokens": _MOST_TOKENS,
        "rollout.max_context_tokens": 288,
        "rewards.endpoints": json.dumps([{"name": "slow", "url": reward_url, "max_concurrency": 512}]),
        "learner.groups_per_step": _GROUPS,
        "learner.max_staleness": max_staleness,
        "learner.lr": 1e-5,
        "learner.checkpoint_every_steps": 0,
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return ["-m", "learner.run", "--config", "/dev/null", *options]


def make_model(folder: Path, seed: int) -> None:
    """Write the random model and its tokenizer: a token for each of 126 characters, and two special ones."""
    import torch

    torch.manual_seed(seed)
    vocabulary = {chr(code): code for code in range(126)} | {"<pad>": 126, "<eos>": 127}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    config = tiny_config(
        vocab_size=128,
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=616,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=127,
        pad_token_id=126,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_prompts(path: Path, seed: int) -> None:
    """Write 1,000 sums as prompts with their results as labels."""
    numbers = random.Random(seed)
    with path.open("w") as file:
        for _ in range(1000):
            a, b = numbers.randrange(100), numbers.randrange(100)
            file.write(json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n")


@contextmanager
def reward_service(delay_s: float = _REWARD_DELAY_S) -> Iterator[str]:
    """Serve a user's slow reward: the share of digits in the response, `delay_s` after each request."""
    app = FastAPI()

    @app.post("/score")
    async def score(request: Request) -> dict[str, list[float]]:
        body = await request.json()
        await asyncio.sleep(delay_s)
        pairs = zip(body["query"], body["prompts"], strict=True)
        responses = [query[len(prompt) :] for query, prompt in pairs]
        return {"rewards": [_share_of_digits(text) for text in responses]}

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/score"
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    sys.exit(main())
