"""Runs a user's sync reward function on the main thread of a process of its own.

Many functions limit their time with signals, which work on the main thread only: math-verify raises elsewhere, or
its caller returns 0. Each process calls the function for one request at a time.

    python -m rewards.function_process REFERENCE READS LABEL_NAME [DIGEST]
    JSON lines: samples in, scores or a failure out
"""

import asyncio
import dataclasses
import json
import os
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from protocol.errors import OperatorError
from protocol.waits import all_of
from rewards.known_answers import HANGS
from rewards.processes import Process, ProcessDied, ProcessPool
from rewards.sample import Sample, Score, Scorer, ScorerFailure, ServedScorer
from rewards.user_function import UserFunction


def load_scorer(reference: str, number: int = 1, reads: str = "auto", label_name: str = "") -> ServedScorer:
    """Return the scorer of `FILE.py[:NAME]` or `MODULE:NAME`; an async function runs in this process.

    number: processes of a sync function. reads, label_name: see UserFunction.
    Raises: OperatorError if the file cannot be loaded, or the function is missing or has an unknown form.
    """
    module = "rewards.function_process"
    try:
        first = Process((module, reference, reads, label_name))
    except ProcessDied as error:
        cure = "It does not return from a known answer. Repair it, or give --solution-str or --completions"
        hangs = f" ({cure})" if f"status {HANGS}" in str(error) else ""
        raise OperatorError(f"rewards: --function {reference} cannot be loaded: {error}{hangs}") from None
    if "problem" in first.greeting:
        raise OperatorError(first.greeting["problem"])
    decided = first.greeting["reads"]
    if reads == "auto" and decided == "sequence":
        problem = "without the prompt a right answer got 0. --solution-str response changes that."
        print(f"rewards: {reference} gets prompt and response, as in Search-R1: {problem}", file=sys.stderr)
    if problem := first.greeting["may_read_sequence"]:
        print(
            f"rewards: {reference} gets the response alone, and {problem}. Does a right answer score? If not, start "
            "with --solution-str sequence. --solution-str response ends this question.",
            file=sys.stderr,
        )
    if first.greeting["compares_samples"]:
        problem = "known answers score otherwise together than alone, and a run sends samples alone or in any batch"
        print(f"rewards: {reference} compares the samples of a call: {problem}. Score each by itself.", file=sys.stderr)
    if first.greeting["reads_prompts"]:
        what = "one user message with the rendered prompt" if decided == "messages" else "the rendered prompt"
        print(f"rewards: {reference} gets {what} as each of its prompts, not the row's messages.", file=sys.stderr)
    if first.greeting["reads_calls"]:
        given = "a completion here is one message with the texts of the conversation, without tool_calls"
        print(f"rewards: {reference} looks for calls or replies of tools, and {given}.", file=sys.stderr)
    elif decided == "messages":
        given = "one message, which holds all turns of a conversation and the replies of tools"
        print(f"rewards: {reference} gets each completion as {given}.", file=sys.stderr)
    what_decides = first.greeting["digest"], tuple(first.greeting["files"]), first.greeting["called"]
    if first.greeting["is_async"]:
        return ServedScorer(UserFunction(reference, decided, label_name).score, *what_decides)
    # Processes that start later refuse edited code: one service never scores by two versions.
    pool = ProcessPool((module, reference, decided, label_name, first.greeting["digest"]), number, first)
    return ServedScorer(_pooled_scorer(pool, first.greeting["takes_batch"]), *what_decides)


def _pooled_scorer(pool: ProcessPool, takes_batch: bool) -> Scorer:
    async def call(samples: Sequence[Sample], index: int | None) -> list[Score]:
        try:
            reply = await pool.call([dataclasses.asdict(sample) for sample in samples])
        except ProcessDied as error:
            raise ScorerFailure(index, "ProcessDied", str(error)) from None
        if "failure" in reply:
            raise ScorerFailure(index, *reply["failure"])
        return [Score(**score) for score in reply["scores"]]

    async def score(samples: Sequence[Sample]) -> list[Score]:
        if takes_batch:
            return await call(samples, None)
        return [score for (score,) in await all_of(call([each], index) for index, each in enumerate(samples))]

    return score


def main(reference: str, reads: str, label_name: str, digest: str = "") -> None:
    """digest: of the service's code; empty: this process is the first."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints goes to the service's log
    given = os.fdopen(os.dup(0))  # a program that the function starts reads nothing: requests have labels
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(given, requests), daemon=True).start()
    try:
        function = UserFunction(reference, reads, label_name)
        greeting: dict[str, Any] = {"is_async": function.is_async, "takes_batch": function.takes_batch,
                                    "reads": function.reads,
                                    "may_read_sequence": function.may_read_sequence,
                                    "reads_calls": function.reads_calls,
                                    "reads_prompts": function.reads_prompts,
                                    "compares_samples": not digest and function.compares_samples(),
                                    "digest": function.digest,
                                    "called": function.called,
                                    "files": [str(file) for file in function.files]}  # fmt: skip
    except OperatorError as error:
        greeting = {"problem": str(error)}
    print(json.dumps(greeting), file=replies, flush=True)
    while True:
        samples = [Sample(**sample) for sample in json.loads(requests.get())]
        answer = _edited(reference) if digest not in ("", greeting.get("digest")) else _answer(function, samples)
        print(json.dumps(answer), file=replies, flush=True)


def _edited(reference: str) -> dict[str, Any]:
    problem = f"{reference} was edited since the service started. Restart the service for the new code"
    return {"failure": ["EditedCode", problem, ""]}


def _answer(function: UserFunction, samples: Sequence[Sample]) -> dict[str, Any]:
    try:
        return {"scores": [dataclasses.asdict(score) for score in asyncio.run(function.score(samples))]}
    except ScorerFailure as failure:
        return {"failure": [failure.kind, failure.message, failure.place]}


def _read_requests(given: TextIO, requests: "queue.SimpleQueue[str]") -> None:
    """Queue the service's lines. The service's end also ends a function that never returns."""
    for line in given:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
