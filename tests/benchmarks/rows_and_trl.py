"""Tokens per second of fine-tuning and DPO on this machine's cores, with Sluice and with TRL 1.16, on the same rows.

    uv pip install --target DIR --no-deps trl==1.16.0 accelerate datasets multiprocess dill xxhash pyarrow pandas \
        python-dateutil six pytz
    python -m tests.benchmarks.rows_and_trl --trl DIR [--seed N] [--repeats N]

A random Qwen2-architecture model of 3.0M parameters, float32, no activation checkpointing; 448 rows of log-normal
lengths (median 60 characters, at most 1,000; a character is a token), 64 in a step, 7 steps. Sluice: a cluster of its
own, two ranks of one thread. TRL: two threads, 8 rows in a micro-batch, as its defaults have it. The two take turns;
a rate is from the end of the first step to that of the last. holds: both medians are at least twice TRL's.
"""

import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.throughput import make_model
from tests.chaos.rig.verdict import conclude, options
from tests.flow.flow_cluster import FlowCluster

_NUM_ROWS, _ROWS_PER_STEP, _MICRO_ROWS = 448, 64, 8
_TARGET = 2.0


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] in _TRAINERS:
        return _train_with_trl(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    arguments = options(__doc__ or "", trl="", repeats=3)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        make_model(work / "model", arguments.seed)
        tokens = {objective: _write_rows(work, objective, arguments.seed) for objective in _TRAINERS}
        (work / "cluster").mkdir()
        cluster = FlowCluster(work / "cluster")
        try:
            assert (started := cluster.start()).returncode == 0, started.stderr
            for repeat in range(arguments.repeats):
                for objective, num in tokens.items():
                    of_step = num * _ROWS_PER_STEP / _NUM_ROWS
                    for side, seconds in (
                        ("trl", _trl_seconds(work, objective, arguments.trl)),
                        ("sluice", _sluice_seconds(cluster, work, objective, repeat)),
                    ):
                        rates.setdefault(f"{objective}_{side}", []).append(of_step / seconds)
                        print(f"rows_and_trl: {objective} {side} {of_step / seconds:.0f} tokens/s", flush=True)
        finally:
            cluster.stop()
    medians = {name: statistics.median(each) for name, each in rates.items()}
    gains = {f"{objective}_gain": medians[f"{objective}_sluice"] / medians[f"{objective}_trl"] for objective in tokens}
    return conclude("rows_and_trl", min(gains.values()) >= _TARGET, **medians, **gains, target=_TARGET)


def _write_rows(work: Path, objective: str, seed: int) -> int:
    """Write the rows of an objective; returns their tokens, the ends of answers among them."""
    draw, num = random.Random(seed), 0

    def text() -> str:
        return "".join(draw.choices("abcdefgh ", k=max(4, min(1000, int(draw.lognormvariate(4.1, 1.0))))))

    with (work / f"{objective}.jsonl").open("w") as file:
        for _ in range(_NUM_ROWS):
            answers = [text() for _ in range(1 if objective == "sft" else 2)]
            names = ["completion"] if objective == "sft" else ["chosen", "rejected"]
            file.write(json.dumps({"prompt": "0123456789=", **dict(zip(names, answers, strict=True))}) + "\n")
            num += sum(len(answer) + 12 for answer in answers)
    return num


def _sluice_seconds(cluster: FlowCluster, work: Path, objective: str, repeat: int) -> float:
    """Return the seconds of a step of a run."""
    given = {
        "objective": objective,
        "run.name": f"{objective}-{repeat}",
        "run.dir": str(work / "runs"),
        "run.max_epochs": 1,
        "policy.model": str(work / "model"),
        "policy.dtype": "float32",
        "learner.gradient_checkpointing": "false",
        "data.train": str(work / f"{objective}.jsonl"),
        "learner.num_ranks": 2,
        "learner.groups_per_step": _ROWS_PER_STEP,
        "learner.micro_batch_tokens": 1024,
        "learner.checkpoint_every_steps": 0,
    }
    ran = cluster.run(
        "--config", "/dev/null", *(part for key, each in given.items() for part in (f"--{key}", str(each)))
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = (work / "runs" / f"{objective}-{repeat}" / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time_s"] for line in lines]
    return float(times[-1] - times[0]) / (len(times) - 1)


def _trl_seconds(work: Path, objective: str, trl: str) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.rows_and_trl", objective, str(work), str(work / "trl.json")]
    places = os.pathsep.join(filter(None, [str(Path.cwd()), trl, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return float(json.loads((work / "trl.json").read_text()))


_TRAINERS = {"sft": ("SFTTrainer", "SFTConfig"), "dpo": ("DPOTrainer", "DPOConfig")}


def _train_with_trl(objective: str, work: Path, result: Path) -> int:
    """Train an epoch with TRL and write the seconds of a step."""
    trl, datasets, transformers = (importlib.import_module(name) for name in ("trl", "datasets", "transformers"))
    ended_at: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended_at.append(time.monotonic())

    trainer, config = (getattr(trl, name) for name in _TRAINERS[objective])
    trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype="float32"),
        processing_class=transformers.AutoTokenizer.from_pretrained(work / "model"),
        train_dataset=datasets.load_dataset("json", data_files=str(work / f"{objective}.jsonl"), split="train"),
        callbacks=[Clock()],
        args=config(
            str(work / "trl"), num_train_epochs=1, per_device_train_batch_size=_MICRO_ROWS,
            gradient_accumulation_steps=_ROWS_PER_STEP // _MICRO_ROWS, max_length=None, use_cpu=True, bf16=False,
            gradient_checkpointing=False, save_strategy="no", report_to=[],
        ),
    ).train()  # fmt: skip
    result.write_text(json.dumps((ended_at[-1] - ended_at[0]) / (len(ended_at) - 1)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
