"""Searches per second of the retriever beside a plain server with the same library, and what it does when overrun.

    python -m tests.benchmarks.retriever [--seed N] [--short]

50,000 Debian package descriptions (`apt-cache dumpavail`; after `apt-get update`), 64 clients, no query twice. BM25 and
flat dense (a random BERT encoder of 384 dimensions and 2 layers, its word pieces learnt from the descriptions; --short:
over 2,000 documents), each in turn beside a FastAPI server that answers one request at a time with the same library.
Both have one OpenMP thread, as a cluster's retriever has; ours searches dense on a thread for each core.
Then ten times what was answered before is asked for, by 640 clients and those who wait for an answer.

holds: five times the queries per second at equal results (equal ones may change places where scores differ by less than
1e-5); overrun (nine times at least), accepted requests have a p99 of at most 1 s, refused ones their 503 within 50 ms,
a second overrun costs less than 5 % of memory more than the first, and 2 s later all is as before.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.benchmarks.load import Outcome, load, percentile
from tests.chaos.rig.verdict import conclude, options

_DOCUMENTS, _CLIENTS, _TOPK = 50_000, 64, 3
_OVERRUN = 10
_WAIT_S = 0.5
_NEAR = 1e-5


def main() -> int:
    arguments = options(__doc__ or "")
    num_encoded, rounds = (2_000, 1) if arguments.short else (_DOCUMENTS, 3)
    chance = random.Random(arguments.seed)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = write_corpus(folder / "bm25.jsonl", _DOCUMENTS)
        encoded = (folder / "bm25.jsonl").read_text().splitlines()[:num_encoded]
        (folder / "e5.jsonl").write_text("\n".join(encoded))
        make_encoder(folder / "encoder", texts)
        for kind, num_requests, threads in (("bm25", 1500, 1), ("e5", 400, os.cpu_count() or 1)):
            extra = ("--num-threads", str(threads))
            with served(folder, kind, "retriever.serve", *extra) as ours, served(folder, kind, _PLAIN) as plain:
                figures |= compared(kind, ours.url, plain.url, texts, chance, rounds, num_requests)
            with served(folder, kind, "retriever.serve", *extra) as ours:
                figures |= overrun(kind, ours, texts, chance, num_requests)
    holds = all(
        figures[f"{kind}_ratio"] >= 5
        and figures[f"{kind}_different"] == 0
        and figures[f"{kind}_overrun"] >= 9
        and figures[f"{kind}_overrun_p99_s"] <= 1
        and figures[f"{kind}_refused_p99_s"] <= 0.05
        and figures[f"{kind}_memory_ratio"] <= 1.05
        and figures[f"{kind}_after_ratio"] >= 0.8
        for kind in ("bm25", "e5")
    )
    return conclude("retriever", holds, **figures)


def compared(
    kind: str, ours: str, plain: str, texts: list[str], chance: random.Random, rounds: int, num_requests: int
) -> dict[str, float]:
    """Return both rates, their ratio, and how many queries asked together were answered otherwise than alone."""
    rates: dict[str, list[float]] = {ours: [], plain: []}
    for _ in range(rounds):
        for url in rates:
            outcome = _load(url, queries_of(texts, chance, num_requests))
            rates[url].append(outcome.rate)
            print(f"{kind} {'ours' if url == ours else 'plain'}: {outcome.rate:.0f} queries/s", flush=True)
    asked = queries_of(texts, chance, 100)
    found, expected = _scores(ours, asked, _CLIENTS, _TOPK), _scores(plain, asked, 1, 20 * _TOPK)
    mine, theirs = median(rates[ours]), median(rates[plain])
    return {
        f"{kind}_per_s": mine,
        f"{kind}_plain_per_s": theirs,
        f"{kind}_ratio": mine / theirs,
        f"{kind}_different": sum(_differ(*pair) for pair in zip(found, expected, strict=True)),
    }


def _scores(url: str, queries: list[str], num_clients: int, topk: int) -> list[dict[str, float]]:
    """Return each query's documents with their scores, best first."""
    bodies = [{"queries": [query], "topk": topk, "return_scores": True} for query in queries]
    answers = load(url, bodies.__getitem__, num_clients, len(bodies), 0.02).answers
    found = [json.loads(answers[number])["result"][0] for number in range(len(queries))]
    return [{item["document"]["id"]: item["score"] for item in items} for items in found]


def _differ(found: dict[str, float], expected: dict[str, float]) -> bool:
    """Return whether the best scores are others, or not those documents'. expected: more than were asked for."""

    def far(one: float, other: float) -> bool:
        return abs(one - other) > _NEAR * max(1.0, abs(other))

    best = list(expected.values())[:_TOPK]
    return (
        len(found) != len(best)
        or any(far(*pair) for pair in zip(found.values(), best, strict=True))
        or any(row not in expected or far(score, expected[row]) for row, score in found.items())
    )


def overrun(kind: str, ours: "Served", texts: list[str], chance: random.Random, num_requests: int) -> dict[str, float]:
    """Return what accepted and refused requests saw under ten times the requests, and the rate 2 s later."""
    _load(ours.url, queries_of(texts, chance, num_requests))
    before = _load(ours.url, queries_of(texts, chance, num_requests)).rate
    # As many besides as wait for an answer meanwhile.
    num_clients = _OVERRUN * _CLIENTS + int(before * _WAIT_S)

    def flooded(pause_s: float) -> Outcome:
        return _load(ours.url, queries_of(texts, chance, 4 * num_requests), num_clients, pause_s)

    # The first tells how long a pause asks for ten times, and leaves each connection its memory.
    pause_s = num_clients / (before * _OVERRUN)
    first = flooded(pause_s)
    bytes_before, answered_s = ours.resident_bytes, percentile(first.refused_seconds, 0.5)
    flood = flooded(max(0.0, (pause_s + answered_s) * first.asked_per_s / (before * _OVERRUN) - answered_s))
    memory_ratio = ours.resident_bytes / bytes_before
    time.sleep(2)
    after = _load(ours.url, queries_of(texts, chance, num_requests)).rate
    print(f"{kind} overrun: {len(flood.seconds)} accepted, {len(flood.refused_seconds)} refused", flush=True)
    return {
        f"{kind}_overrun": flood.asked_per_s / before,
        f"{kind}_overrun_p99_s": percentile(flood.seconds, 0.99),
        f"{kind}_refused_p50_s": percentile(flood.refused_seconds, 0.5),
        f"{kind}_refused_p99_s": percentile(flood.refused_seconds, 0.99),
        f"{kind}_memory_ratio": memory_ratio,
        f"{kind}_after_ratio": after / before,
    }


def queries_of(texts: list[str], chance: random.Random, number: int) -> list[str]:
    """Return queries of a few words out of a document each."""
    made = []
    for _ in range(number):
        words = chance.choice(texts).split()
        start = chance.randrange(max(1, len(words) - 6))
        made.append(" ".join(words[start : start + 6]) + f" {chance.randrange(10**9)}")
    return made


def write_corpus(path: Path, number: int) -> list[str]:
    """Return the descriptions, now in a JSONL file."""
    dumped = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    texts = []
    for package in dumped.split("\n\n")[: 2 * number]:
        lines = package.splitlines()
        name = next((line[9:] for line in lines if line.startswith("Package: ")), "")
        said = [line.partition("Description")[2].partition(": ")[2] for line in lines if line.startswith("Description")]
        if name and said and len(texts) < number:
            texts.append(f'"{name}"\n{said[0]} ' + " ".join(line.strip() for line in lines if line.startswith("  ")))
    with path.open("w") as file:
        for row, text in enumerate(texts):
            file.write(json.dumps({"id": str(row), "contents": text}) + "\n")
    print(f"{len(texts)} documents", flush=True)
    return texts


def make_encoder(folder: Path, texts: list[str]) -> None:
    """Write a random encoder in the shape of small ones, with a tokenizer of the texts' word pieces."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=16_000, special_tokens=special, show_progress=False)
    pieces.train_from_iterator(texts[::5], trainer)
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=pieces, **names).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=pieces.get_vocab_size(), **shape)).save_pretrained(folder)


def _load(url: str, queries: list[str], num_clients: int = _CLIENTS, pause_s: float = 0.02) -> Outcome:
    """pause_s: after a 503."""

    def body_of(number: int) -> dict[str, object]:
        return {"queries": [queries[number]], "topk": _TOPK}

    return load(url, body_of, num_clients, len(queries), pause_s)


_PLAIN = "tests.benchmarks.plain_retriever"


@dataclass(frozen=True)
class Served:
    """A server under test."""

    url: str  # of POST /retrieve
    pid: int

    @property
    def resident_bytes(self) -> int:
        """Memory that is its own or shared."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()


@contextmanager
def served(folder: Path, kind: str, module: str, *extra: str) -> Iterator[Served]:
    """Yield a server of one kind's index."""
    command = [sys.executable, "-m", module, "--port", "0", "--retriever-name", kind, "--cache-size", "0"]
    command += ["--index-path", str(folder / kind), "--corpus-path", str(folder / f"{kind}.jsonl")]
    command += ["--retriever-model", str(folder / "encoder"), *extra]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield Served(process.stdout.readline().split()[-1] + "/retrieve", process.pid)
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
