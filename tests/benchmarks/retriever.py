"""Searches per second of the retriever beside a plain server with the same library, and what it does when overrun.

    python -m tests.benchmarks.retriever [--seed N] [--short]

50,000 Debian package descriptions (`apt-cache dumpavail`; after `apt-get update`), 64 clients, no query twice. BM25 and
flat dense (a random encoder of 384 dimensions and 2 layers; --short: over 2,000 documents), each in turn beside a
FastAPI server that answers one request at a time with the same index. Then ten times as many clients as fill it.

holds: five times the queries per second at equal results; overrun, accepted requests have a p99 of at most 1 s, refused
ones their 503 within 50 ms, and 2 s later all is as before.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx

from tests.benchmarks.load import Outcome, load, percentile
from tests.chaos.rig.verdict import conclude, options

_DOCUMENTS, _CLIENTS, _TOPK = 50_000, 64, 3


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
        make_encoder(folder / "encoder")
        for kind, num_requests in (("bm25", 1500), ("e5", 200)):
            with served(folder, kind, "retriever.serve") as ours, served(folder, kind, _PLAIN) as plain:
                figures |= compared(kind, ours, plain, texts, chance, rounds, num_requests)
                if kind == "bm25":
                    figures |= overrun(ours, texts, chance)
    holds = (
        min(figures["bm25_ratio"], figures["e5_ratio"]) >= 5
        and figures["different"] == 0
        and figures["overrun_p99_s"] <= 1
        and figures["refused_p99_s"] <= 0.05
        and figures["after_ratio"] >= 0.8
    )
    return conclude("retriever", holds, **figures)


def compared(
    kind: str, ours: str, plain: str, texts: list[str], chance: random.Random, rounds: int, num_requests: int
) -> dict[str, float]:
    """Return both rates, their ratio, and how many queries were answered otherwise."""
    rates: dict[str, list[float]] = {ours: [], plain: []}
    for _ in range(rounds):
        for url in rates:
            outcome = _load(url, queries_of(texts, chance, num_requests))
            rates[url].append(outcome.rate)
            print(f"{kind} {'ours' if url == ours else 'plain'}: {outcome.rate:.0f} queries/s", flush=True)
    asked = [{"queries": [query], "topk": _TOPK} for query in queries_of(texts, chance, 50)]
    pairs = [[httpx.post(url, json=body, timeout=60).json() for url in (ours, plain)] for body in asked]
    different = sum(one != other for one, other in pairs)
    mine, theirs = median(rates[ours]), median(rates[plain])
    return {
        f"{kind}_per_s": mine,
        f"{kind}_plain_per_s": theirs,
        f"{kind}_ratio": mine / theirs,
        "different": different,
    }


def overrun(url: str, texts: list[str], chance: random.Random) -> dict[str, float]:
    """Return what accepted and refused requests saw under ten times the clients, and the rate 2 s later."""
    before = _load(url, queries_of(texts, chance, 1000)).rate
    flood = _load(url, queries_of(texts, chance, 10_000), 10 * _CLIENTS)
    asyncio.run(asyncio.sleep(2))
    after = _load(url, queries_of(texts, chance, 1000)).rate
    print(f"overrun: {len(flood.seconds)} accepted, {len(flood.refused_seconds)} refused", flush=True)
    return {
        "overrun_p99_s": percentile(flood.seconds, 0.99),
        "refused_p99_s": percentile(flood.refused_seconds, 0.99),
        "after_ratio": after / before,
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


def make_encoder(folder: Path) -> None:
    """Write a random encoder in the shape of small ones."""
    from transformers import BertConfig, BertModel

    from tests.fakes.tiny_encoder import word_tokenizer

    shape = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=64, **shape)).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


def _load(url: str, queries: list[str], num_clients: int = _CLIENTS) -> Outcome:
    def body_of(number: int) -> dict[str, object]:
        return {"queries": [queries[number]], "topk": _TOPK}

    return asyncio.run(load(url, body_of, num_clients, len(queries)))


_PLAIN = "tests.benchmarks.plain_retriever"


@contextmanager
def served(folder: Path, kind: str, module: str) -> Iterator[str]:
    """Yield the URL of a server of one kind's index."""
    command = [sys.executable, "-m", module, "--port", "0", "--retriever-name", kind, "--cache-size", "0"]
    command += ["--index-path", str(folder / kind), "--corpus-path", str(folder / f"{kind}.jsonl")]
    command += ["--retriever-model", str(folder / "encoder")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1] + "/retrieve"
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
