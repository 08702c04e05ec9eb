"""Samples per second of a whole run on this machine, beside what staleness 0 (synchronous) and 1 give on the same work.

    python -m tests.benchmarks.throughput [--seed N] [--short]

The work: a random Qwen2-architecture model of 3.0M parameters (hidden 256, 4 layers, 128 tokens), prompts `a+b=`,
8 prompts x 8 samples a step, at most 256 new tokens at temperature 1, a reward service that answers each request after
0.5 s. Needs a running cluster (deploy/start_cluster.sh). Each staleness runs in turn on the same warm rollout server;
`--short` makes 6 steps of staleness 4 alone. holds: staleness 4 reaches 17 samples/s.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tests.chaos.rig.verdict import conclude, options
from tests.fakes.tiny_models import tiny_config

TARGET_SAMPLES_PER_S = 17.0
_REWARD_DELAY_S = 0.5


def main() -> int:
    arguments = options(__doc__ or "")
    stalenesses, num_steps = ([4], 6) if arguments.short else ([0, 1, 4], 30)
    rates = {}
    with tempfile.TemporaryDirectory() as folder, reward_service() as url:
        work = Path(folder)
        make_model(work / "model", arguments.seed)
        make_prompts(work / "prompts.jsonl", arguments.seed)
        for staleness in stalenesses:
            rates[staleness] = measure(work, url, staleness, num_steps, arguments.seed)
            print(f"staleness {staleness}: {rates[staleness]:.1f} samples/s over {num_steps} steps", flush=True)
    figures = {f"staleness_{staleness}": rate for staleness, rate in rates.items()}
    return conclude("throughput", rates[4] >= TARGET_SAMPLES_PER_S, **figures, target=TARGET_SAMPLES_PER_S)


def measure(work: Path, reward_url: str, max_staleness: int, num_steps: int, seed: int) -> float:
    """Return samples per second from the end of the first step, which waits for the first samples, to the last one."""
    name = f"staleness-{max_staleness}"
    command = run_command(work, name, reward_url, max_staleness, num_steps, seed)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (work / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    seconds = lines[-1]["time_s"] - lines[0]["time_s"]
    return sum(line["data/num_samples"] for line in lines[1:]) / float(seconds)


def run_command(work: Path, name: str, reward_url: str, max_staleness: int, num_steps: int, seed: int) -> list[str]:
    """Return Python's arguments of a run below work/runs, whose model and prompts are in `work`."""
    settings = {
        "run.name": name,
        "run.dir": str(work / "runs"),
        "run.seed": seed,
        "run.max_steps": num_steps,
        "policy.model": str(work / "model"),
        "policy.dtype": "float32",
        "data.train": str(work / "prompts.jsonl"),
        "rollout.environment": "single_turn",
        "rollout.group_size": 8,
        "rollout.max_response_tokens": 256,
        "rollout.max_context_tokens": 288,
        "rewards.endpoints": json.dumps([{"name": "slow", "url": reward_url, "max_concurrency": 512}]),
        "learner.groups_per_step": 8,
        "learner.max_staleness": max_staleness,
        "learner.lr": 1e-5,
        "learner.checkpoint_every_steps": 0,
    }
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
def reward_service() -> Iterator[str]:
    """Serve a user's slow reward: the share of digits in the response, half a second after each request."""
    app = FastAPI()

    @app.post("/score")
    async def score(request: Request) -> dict[str, list[float]]:
        body = await request.json()
        await asyncio.sleep(_REWARD_DELAY_S)
        pairs = zip(body["query"], body["prompts"], strict=True)
        responses = [query[len(prompt) :] for query, prompt in pairs]
        return {"rewards": [sum(c.isdigit() for c in text) / max(1, len(text)) for text in responses]}

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
